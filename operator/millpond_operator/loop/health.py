"""Liveness that means something: the last full list is recent, and the event loop answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

MAX_REQUEST_BYTES = 8192
READ_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One small HTTP answer."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


Route = Callable[[], Answer]
_PHRASES = {200: "OK", 404: "Not Found", 503: "Service Unavailable"}


class AdminServer:
    """Answers a few GET paths; a whole web framework would be more than this process needs."""

    def __init__(self, routes: dict[str, Route]) -> None:
        self._routes = routes
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port, which the system chooses when asked for 0."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_REQUEST_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(
            OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError
        ):
            async with asyncio.timeout(READ_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
            answer = self._answer(head)
            lines = [
                f"HTTP/1.1 {answer.status} {_PHRASES[answer.status]}",
                f"content-type: {answer.content_type}",
                f"content-length: {len(answer.body)}",
                "connection: close",
            ]
            writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + answer.body)
            await writer.drain()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    def _answer(self, head: bytes) -> Answer:
        words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        path = words[1].partition("?")[0] if len(words) == 3 and words[0] == "GET" else ""
        route = self._routes.get(path)
        return route() if route is not None else Answer(404, b"not found\n")


def make_metrics_route(registry: CollectorRegistry) -> Route:
    """The exposition of a registry."""
    return lambda: Answer(200, generate_latest(registry), CONTENT_TYPE_LATEST)


def make_check_route(check: Callable[[], str | None]) -> Route:
    """200 while the check finds nothing, else 503 with what it found."""

    def route() -> Answer:
        problem = check()
        return Answer(200, b"ok\n") if problem is None else Answer(503, f"{problem}\n".encode())

    return route
