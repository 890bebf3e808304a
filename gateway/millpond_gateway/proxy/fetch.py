"""Small requests of the gateway itself to an engine, over the same connections as the data path."""

from __future__ import annotations

import asyncio

import msgspec

from millpond_gateway.proxy.connections import Connections
from millpond_gateway.proxy.engine import EngineConnection
from millpond_gateway.proxy.records import AnswerHead, Breakage
from millpond_gateway.routing.records import EndpointView

_MAX_BODY_BYTES = 1024 * 1024


class Fetched(msgspec.Struct, frozen=True):
    """A complete small answer."""

    head: AnswerHead
    body: bytes


class _Collector:
    """Gathers one answer for whoever awaits it."""

    def __init__(self) -> None:
        self.result: asyncio.Future[Fetched] = asyncio.get_running_loop().create_future()
        self._head: AnswerHead | None = None
        self._body = b""

    def on_head(self, head: AnswerHead) -> None:
        self._head = head

    def on_data(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > _MAX_BODY_BYTES:
            self._fail("the answer is too large")

    def on_read(self) -> None: ...

    def on_end(self) -> None:
        if self._head is not None and not self.result.done():
            self.result.set_result(Fetched(self._head, self._body))

    def on_broken(self, breakage: Breakage) -> None:
        self._fail(breakage.message)

    def _fail(self, message: str) -> None:
        if not self.result.done():
            self.result.set_exception(ConnectionError(message))


async def fetch(
    connections: Connections,
    endpoint: EndpointView,
    path: str,
    *,
    timeout_seconds: float,
    fresh: bool = False,
) -> Fetched:
    """GET one path of an engine; `fresh` insists on a new connection.

    Raises:
        OSError: no connection, a broken one, or no answer in time (TimeoutError is one).
    """
    request = f"GET {endpoint.prefix}{path} HTTP/1.1\r\nhost: {endpoint.address}\r\n\r\n".encode()
    connection: EngineConnection | None = None if fresh else connections.take(endpoint)
    async with asyncio.timeout(timeout_seconds):
        if connection is None:
            connection = await connections.open(endpoint)
        collector = _Collector()
        connection.send(collector, request)
        try:
            return await collector.result
        finally:
            if not collector.result.done() or collector.result.cancelled() or collector.result.exception():
                connection.cancel()
