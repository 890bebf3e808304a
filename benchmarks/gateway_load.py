"""A load generator for gateway benchmarks, cheap enough not to be what is measured.

`python -m benchmarks.gateway_load '{"port": …}'` prints one JSON line: counts and latencies.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import cast

import uvloop


@dataclass(frozen=True)
class Load:
    """One run."""

    port: int
    num_connections: int = 1
    num_requests: int = 1000
    prompt_bytes: int = 300
    chunks: int = 0
    """Of each stream; 0 asks for a plain answer."""
    gap_milliseconds: int = 20
    num_prefixes: int = 16
    """Distinct prompt beginnings; the last part of each prompt is its own."""


@dataclass
class Result:
    """What the clients saw."""

    num_ok: int = 0
    num_failed: int = 0
    num_chunks: int = 0
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    first_bytes: list[float] = field(default_factory=list)


def make_request(load: Load, number: int) -> bytes:
    """One chat request; requests of one prefix share all but the tail of their prompt."""
    prefix = f"prefix {number % load.num_prefixes:04d} "
    text = (prefix * (load.prompt_bytes // len(prefix) + 1))[
        : max(0, load.prompt_bytes - 20)
    ] + f" question {number:08d}"
    body: dict[str, object] = {
        "model": "m",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 64,
    }
    if load.chunks:
        body |= {"stream": True, "max_tokens": load.chunks, "seed": load.gap_milliseconds}
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{load.port}\r\ncontent-type: application/json\r\n"
        f"accept: */*\r\nuser-agent: bench\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


class Client(asyncio.Protocol):
    """One connection: the next request begins when the answer before it is complete."""

    def __init__(self, load: Load, result: Result, numbers: list[int], done: asyncio.Event) -> None:
        self._load = load
        self._result = result
        self._numbers = numbers
        self._done = done
        self._began = 0.0
        self._first = True
        self._head = b""
        self._missing: int | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._next()

    def _next(self) -> None:
        assert self._transport is not None
        if not self._numbers:
            self._transport.close()
            return
        request = make_request(self._load, self._numbers.pop())
        self._head, self._missing, self._first = b"", None, True
        self._began = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        if self._first:
            self._first = False
            self._result.first_bytes.append(time.perf_counter() - self._began)
        if self._load.chunks:
            self._result.num_chunks += data.count(b"data: {")
            self._head = (self._head + data)[-64:]
            if self._head.endswith(b"0\r\n\r\n"):
                self._finish(ok=b"[DONE]" in self._head)
            return
        if self._missing is None:
            self._head += data
            head, separator, rest = self._head.partition(b"\r\n\r\n")
            if not separator:
                return
            lowered = head.lower()
            self._missing = int(lowered.partition(b"content-length: ")[2].split(b"\r\n")[0]) - len(rest)
        else:
            self._missing -= len(data)
        if self._missing <= 0:
            self._finish(ok=self._head.startswith(b"HTTP/1.1 200"))

    def _finish(self, *, ok: bool) -> None:
        self._result.latencies.append(time.perf_counter() - self._began)
        self._result.num_ok += ok
        self._result.num_failed += not ok
        self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._missing is not None and self._missing > 0:
            self._result.num_failed += 1
        self._done.set()


async def run(load: Load) -> Result:
    """Send all requests and gather what came back."""
    loop = asyncio.get_running_loop()
    result = Result()
    numbers = list(range(load.num_requests))
    events = [asyncio.Event() for _ in range(load.num_connections)]
    began = time.perf_counter()
    for event in events:
        await loop.create_connection(partial(Client, load, result, numbers, event), "127.0.0.1", load.port)
    await asyncio.gather(*(event.wait() for event in events))
    result.seconds = time.perf_counter() - began
    result.latencies = thin(result.latencies)
    result.first_bytes = thin(result.first_bytes)
    return result


def thin(values: list[float], num_points: int = 1000) -> list[float]:
    """Quantiles that stand for a long list."""
    ordered = sorted(values)
    if len(ordered) <= num_points:
        return ordered
    return [ordered[position * (len(ordered) - 1) // (num_points - 1)] for position in range(num_points)]


if __name__ == "__main__":
    print(json.dumps(asdict(uvloop.run(run(Load(**json.loads(sys.argv[1])))))))
