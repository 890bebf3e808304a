"""Raw bytes to and from a gateway."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

from tests.fixtures.gateway import MODEL, RunningGateway

BODY = json.dumps({"model": MODEL, "prompt": "hello"}).encode()
STREAM_BODY = json.dumps({"model": MODEL, "prompt": "hello", "stream": True}).encode()


@dataclass
class Answer:
    """One parsed answer and how its connection ended."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    closed: bool

    def find(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]

    @property
    def code(self) -> str:
        return str(json.loads(self.body)["error"]["code"])


def make_request(
    body: bytes = BODY,
    *,
    path: str = "/v1/completions",
    method: str = "POST",
    version: str = "1.1",
    extra: tuple[str, ...] = (),
    framing: str | None = None,
) -> bytes:
    lines = [f"{method} {path} HTTP/{version}", "Host: gateway", "Content-Type: application/json"]
    lines.append(framing if framing is not None else f"Content-Length: {len(body)}")
    return ("\r\n".join([*lines, *extra]) + "\r\n\r\n").encode() + body


async def talk(gateway: RunningGateway, *parts: bytes, pause: float = 0.0, seconds: float = 30.0) -> bytes:
    """Send parts, then read until the gateway closes, or until it has said nothing more for a while."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.process.port)
    received = b""
    try:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(pause)
        async with asyncio.timeout(seconds):
            while data := await reader.read(65536):
                received += data
                if is_whole(received):
                    break
    except (ConnectionError, TimeoutError):
        pass
    finally:
        writer.close()
    return received


def is_whole(received: bytes) -> bool:
    head, separator, rest = received.partition(b"\r\n\r\n")
    if not separator or head.startswith(b"HTTP/1.1 1"):
        return False
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    if lengths:
        return len(rest) >= int(lengths[0].split(b":")[1])
    return rest.endswith(b"0\r\n\r\n")


async def ask(gateway: RunningGateway, *parts: bytes, pause: float = 0.0) -> Answer:
    return parse(await talk(gateway, *parts, pause=pause))


def parse(received: bytes) -> Answer:
    head, _, body = received.partition(b"\r\n\r\n")
    while head.startswith(b"HTTP/1.1 100"):
        head, _, body = body.partition(b"\r\n\r\n")
    line, *rest = head.decode("latin-1").split("\r\n")
    fields = [(name.lower(), value.strip()) for name, _, value in (entry.partition(":") for entry in rest)]
    closed = ("connection", "close") in fields
    return Answer(int(line.split(" ")[1]), fields, body, closed)
