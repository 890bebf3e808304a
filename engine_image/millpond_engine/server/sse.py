"""Server-sent events: one line of JSON per message, safe for clients that split at Unicode line ends."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgspec
from aiohttp import web

DONE = b"data: [DONE]\n\n"
CONTENT_TYPE = "text/event-stream; charset=utf-8"


def encode_json(value: Any) -> bytes:
    """JSON in which no character ends a line for any client: U+0085, U+2028 and U+2029 are escaped.

    Their UTF-8 bytes occur only inside strings, so replacing bytes keeps the document equal.
    """
    data = msgspec.json.encode(value)
    if b"\xc2\x85" in data or b"\xe2\x80" in data:
        data = data.replace(b"\xc2\x85", b"\\u0085")
        data = data.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    return data


def encode_message(value: Any) -> bytes:
    """One `data:` message."""
    return b"data: " + encode_json(value) + b"\n\n"


class EventStream:
    """An open response; every write has a bound on how long the client may make it wait."""

    def __init__(self, response: web.StreamResponse, slow_reader_seconds: float) -> None:
        self._response = response
        self._seconds = slow_reader_seconds
        self._pending: asyncio.Timeout | None = None

    @classmethod
    async def open(cls, request: web.Request, slow_reader_seconds: float) -> EventStream:
        """Send status line and headers."""
        response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE, "Cache-Control": "no-cache"})
        await response.prepare(request)
        return cls(response, slow_reader_seconds)

    @property
    def response(self) -> web.StreamResponse:
        """What the handler returns."""
        return self._response

    async def write(self, data: bytes) -> None:
        """Send bytes.

        Raises:
            TimeoutError: the client took nothing for too long.
            ConnectionError: it has gone.
        """
        try:
            async with asyncio.timeout(self._seconds) as self._pending:
                await self._response.write(data)
        finally:
            self._pending = None

    def hurry(self, seconds: float) -> None:
        """Give the client at most this long from now on for what it is being sent."""
        self._seconds = min(self._seconds, seconds)
        latest = asyncio.get_running_loop().time() + self._seconds
        if self._pending is not None and latest < (self._pending.when() or math.inf):
            self._pending.reschedule(latest)

    async def end(self, data: bytes) -> None:
        """Send the last bytes and end the body."""
        await self.write(data)
        async with asyncio.timeout(self._seconds):
            await self._response.write_eof()
