"""Trivial replicas for gateway benchmarks: several ports, fixed answers, timed streams, no work at all.

`python -m benchmarks.gateway_replica PORT...` serves until it is ended. A streaming request gets `max_tokens`
chunks, `seed` milliseconds apart: routers pass the body on, and not every header.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import Any, cast

import uvloop

_STREAM = re.compile(rb'"stream"\s*:\s*true')
_MAX_TOKENS = re.compile(rb'"max_(?:completion_)?tokens"\s*:\s*(\d+)')
_SEED = re.compile(rb'"seed"\s*:\s*(\d+)')
_SMALL_BODY = 4096
_CHUNK_TEXT = "token " * 4


def make_event(number: int) -> bytes:
    """One chat chunk of ordinary size, framed."""
    choice = {"index": 0, "delta": {"content": _CHUNK_TEXT}, "logprobs": None, "finish_reason": None}
    event = {
        "id": f"chatcmpl-{number:08x}",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [choice],
    }
    return frame(b"data: " + json.dumps(event).encode() + b"\n\n")


def frame(data: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


_USAGE = {
    "prompt_tokens": 64,
    "completion_tokens": 8,
    "total_tokens": 72,
    "prompt_tokens_details": {"cached_tokens": 0},
}
_MESSAGE = {"role": "assistant", "content": _CHUNK_TEXT * 2}
_BODY = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": _MESSAGE, "finish_reason": "stop"}],
        "usage": _USAGE,
    }
).encode()
_JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
ANSWER = _JSON % (len(_BODY), _BODY)
MODELS = b'{"object":"list","data":[{"id":"m","object":"model","created":1,"owned_by":"x","root":"m","max_model_len":200000}]}'
INFO = b'{"model_path":"m","tokenizer_path":"m","is_generation":true,"model_id":"m","served_model_name":"m"}'
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM_END = frame(b"data: [DONE]\n\n") + b"0\r\n\r\n"
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\ncontent-type: application/json\r\n\r\n{}"
_EVENT = make_event(1)


class Replica(asyncio.Protocol):
    """Answers each request of a connection at once; counts nothing, keeps nothing."""

    def __init__(self) -> None:
        self._buffer = b""
        self._missing = 0
        self._head = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        if self._missing:
            self._missing -= len(data)
            if self._missing <= 0:
                self._missing = 0
                self._answer(self._head, b"")
            return
        self._buffer += data
        head, separator, rest = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        self._buffer = b""
        lowered = head.lower()
        at = lowered.find(b"content-length: ")
        length = int(lowered[at + 16 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        self._head = lowered
        self._missing = max(0, length - len(rest))
        if (self._missing and length < _SMALL_BODY) or (
            b"transfer-encoding: chunked" in lowered and not rest.endswith(b"0\r\n\r\n")
        ):
            self._missing = 0
            self._buffer = head + separator + rest
            return
        if not self._missing:
            self._answer(lowered, rest)

    def _answer(self, head: bytes, body: bytes) -> None:
        assert self._transport is not None
        path = head.split(b" ", 2)[1]
        if path.startswith((b"/v1/chat", b"/v1/completions", b"/generate")):
            if _STREAM.search(body):
                work = self._stream(find_number(_MAX_TOKENS, body), find_number(_SEED, body) / 1000)
                asyncio.get_running_loop().create_task(work)
            else:
                self._transport.write(ANSWER)
        elif path in {b"/health", b"/health_generate"}:
            self._transport.write(_JSON % (2, b"{}"))
        elif path == b"/v1/models":
            self._transport.write(_JSON % (len(MODELS), MODELS))
        elif path in {b"/get_model_info", b"/model_info", b"/get_server_info", b"/server_info"}:
            self._transport.write(_JSON % (len(INFO), INFO))
        else:
            self._transport.write(NOT_FOUND)

    async def _stream(self, chunks: int, gap: float) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        if self._transport is not None:
            self._transport.write(STREAM_HEAD)
        for _ in range(chunks):
            if self._transport is None:
                return
            self._transport.write(_EVENT)
            due += gap
            await asyncio.sleep(max(0.0, due - loop.time()))
        if self._transport is not None:
            self._transport.write(STREAM_END)


def find_number(pattern: re.Pattern[bytes], body: bytes) -> int:
    """Value of a field with an integer; 0 without it."""
    found = pattern.search(body)
    return int(found[1]) if found else 0


async def serve(ports: list[int]) -> None:
    """Listen on every port for ever."""
    loop = asyncio.get_running_loop()
    servers: list[Any] = [
        await loop.create_server(Replica, "127.0.0.1", port, backlog=1024) for port in ports
    ]
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    uvloop.run(serve([int(argument) for argument in sys.argv[1:]]))
