"""Kept connections to engines, per endpoint, without the race of reusing one that the engine is closing."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, cast

from millpond_gateway.proxy.engine import EngineConnection
from millpond_gateway.routing.records import EndpointView

_MIN_IDLE_SECONDS: Final = 0.05


def make_key(endpoint: EndpointView) -> str:
    """Identity of an endpoint's connections: a pod that comes back under the same address is another one."""
    return f"{endpoint.uid}@{endpoint.address}"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`, IPv6 in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


class Connections:
    """All connections of one relay process to all engines; no limit on their number hides here.

    A free connection is used last in, first out and closed after `idle_seconds`. When an engine closes a free
    connection earlier, the limit of that endpoint falls to half of what was seen, so reuse stays clear of it.
    """

    def __init__(self, *, idle_seconds: float, connect_seconds: float, clock: Callable[[], float]) -> None:
        self._idle_seconds = idle_seconds
        self._connect_seconds = connect_seconds
        self._clock = clock
        self._free: dict[str, deque[EngineConnection]] = {}
        self._limits: dict[str, float] = {}
        self.num_open = 0

    def take(self, endpoint: EndpointView) -> EngineConnection | None:
        """A kept connection that is still good, if there is one."""
        key = make_key(endpoint)
        free = self._free.get(key)
        oldest = self._clock() - self._limits.get(key, self._idle_seconds)
        while free:
            connection = free.pop()
            if connection.usable and connection.idle_since > oldest:
                return connection
            connection.close()
        return None

    async def open(self, endpoint: EndpointView) -> EngineConnection:
        """A new connection.

        Raises:
            OSError: refused, unreachable or not accepted in time (TimeoutError is one).
        """
        host, port = split_address(endpoint.address)
        key = make_key(endpoint)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._connect_seconds):
            connection = EngineConnection(self, key)
            await loop.create_connection(lambda: cast("asyncio.Protocol", connection), host, port)
        self.num_open += 1
        return connection

    def on_free(self, connection: EngineConnection) -> None:
        """Keep a connection whose answer is complete."""
        connection.idle_since = self._clock()
        self._free.setdefault(connection.key, deque()).append(connection)

    def on_closed(self, connection: EngineConnection) -> None:
        """Learn from an engine that closed a free connection."""
        self.num_open -= 1
        free = self._free.get(connection.key)
        if free is None or connection not in free:
            return
        free.remove(connection)
        seen = self._clock() - connection.idle_since
        limit = self._limits.get(connection.key, self._idle_seconds)
        if connection.served and seen < limit:
            self._limits[connection.key] = max(_MIN_IDLE_SECONDS, seen / 2)

    def sweep(self) -> None:
        """Close what has been free too long."""
        now = self._clock()
        for key, free in list(self._free.items()):
            oldest = now - self._limits.get(key, self._idle_seconds)
            while free and free[0].idle_since <= oldest:
                free.popleft().close()
            if not free:
                del self._free[key]

    def forget(self, keep: frozenset[str]) -> None:
        """Close free connections of endpoints that are gone, and what was learned about them."""
        for key in [key for key in self._free if key not in keep]:
            for connection in self._free.pop(key):
                connection.close()
        for key in [key for key in self._limits if key not in keep]:
            del self._limits[key]

    def close(self) -> None:
        """Close every free connection."""
        self.forget(frozenset())
