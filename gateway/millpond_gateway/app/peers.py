"""Transport of shared decisions: a mesh of TCP connections among the gateway processes of a namespace.

Frames are a length of four bytes, big-endian, and a message of `routing.wire`. Every process connects to every
peer it knows and accepts connections from peers; answers go back on the connection that asked. A peer that reads
too slowly loses its connection, not this process its memory: the digests heal what it missed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import cast

import structlog

from millpond_common.pace import Pace
from millpond_gateway.proxy.connections import split_address
from millpond_gateway.routing.router import Router
from millpond_gateway.routing.shared import SharedDecisions
from millpond_gateway.routing.wire import MAX_MESSAGE_BYTES, WireError

_log = structlog.get_logger("peers")
FLUSH_SECONDS = 0.01
_HEARTBEAT_SECONDS = 1.0
_CONNECT_SECONDS = 2.0
_MAX_PAUSE_SECONDS = 5.0
_MAX_LINKS = 256
_LOOPBACK = frozenset({"127.0.0.1", "::1"})
"""Other workers of this pod, and whoever else shares its network namespace."""
_MAX_UNSENT_BYTES = 8 * 1024 * 1024
_TELL_SECONDS = 10.0
_PARTITION_SECONDS = 3.0
"""Peers that are listed and yet unheard for longer count as cut off."""


class PeerLink(asyncio.Protocol):
    """One connection to or from a peer."""

    def __init__(self, mesh: PeerMesh, dialed: str = "") -> None:
        self._mesh = mesh
        self._dialed = dialed
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self.closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but name
        peer = transport.get_extra_info("peername")
        host = peer[0].removeprefix("::ffff:") if peer else ""
        if not self._mesh.on_link(self, host, dialed=self._dialed):
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._mesh.on_link_lost(self)
        self.closed.set()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= 4:
            size = int.from_bytes(self._buffer[:4], "big")
            if size > MAX_MESSAGE_BYTES:
                self.close()
                return
            if len(self._buffer) < 4 + size:
                return
            message, self._buffer = self._buffer[4 : 4 + size], self._buffer[4 + size :]
            try:
                answers = self._mesh.on_message(message)
            except WireError as error:
                _log.warning("peer message refused", error=str(error))
                self.close()
                return
            for answer in answers:
                self.send(answer)

    def send(self, message: bytes) -> None:
        """Send one message; a peer that is too far behind is cut off."""
        transport = self._transport
        if transport is None:
            return
        if transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            transport.abort()
            return
        transport.write(len(message).to_bytes(4, "big") + message)

    def close(self) -> None:
        """Cut the connection."""
        if self._transport is not None:
            self._transport.abort()


class PeerMesh:
    """All links of one process, and the clock of what goes out over them."""

    def __init__(
        self,
        shared: SharedDecisions,
        clock: Callable[[], float],
        *,
        any_host: bool = False,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        self._any_host = any_host
        self._on_refused = on_refused
        self.shared = shared
        self._clock = clock
        self._links: set[PeerLink] = set()
        self._dialers: dict[str, asyncio.Task[None]] = {}
        self._outgoing: set[PeerLink] = set()
        self._routers: dict[str, Router] = {}
        self._short_since: float | None = None
        self._refusals = Pace(_TELL_SECONDS, clock)
        self._num_missing = 0
        self._hosts: frozenset[str] = frozenset()
        self._dialed_hosts: dict[str, str] = {}
        self.num_bytes = 0
        """Sent so far, to all peers together."""

    @property
    def num_links(self) -> int:
        """Open connections in both directions."""
        return len(self._links)

    @property
    def num_missing(self) -> int:
        """Listed peers that count as cut off; routing falls back to hashing while there are any."""
        return self._num_missing

    # Pools.

    def attach(self, router: Router) -> None:
        """Share a pool's decisions."""
        self._routers[router.pool] = router
        self.shared.attach(router)
        router.set_partition(1 + self._num_missing)

    def detach(self, pool: str) -> None:
        """A pool is gone."""
        self._routers.pop(pool, None)
        self.shared.detach(pool)

    # Peers.

    def set_peers(self, addresses: frozenset[str]) -> None:
        """Connect to every listed peer and to no other."""
        for address in [address for address in self._dialers if address not in addresses]:
            self._dialers.pop(address).cancel()
            self._dialed_hosts.pop(address, None)
        for address in addresses - self._dialers.keys():
            self._dialers[address] = asyncio.get_running_loop().create_task(self._dial(address))

    async def _dial(self, address: str) -> None:
        """Stay connected to one peer."""
        host, port = split_address(address)
        loop = asyncio.get_running_loop()
        pause = 0.1
        link: PeerLink | None = None
        try:
            while True:
                try:
                    async with asyncio.timeout(_CONNECT_SECONDS):
                        _, link = await loop.create_connection(lambda: PeerLink(self, address), host, port)
                except OSError:
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _MAX_PAUSE_SECONDS)
                    continue
                pause = 0.1
                self._outgoing.add(link)
                for message in self.shared.heartbeat():
                    self._broadcast(message)
                await link.closed.wait()
        finally:
            if link is not None:
                link.close()

    def on_link(self, link: PeerLink, host: str, *, dialed: str = "") -> bool:
        """A connection opened; False when there are too many, or it comes from where no gateway is known.

        Whom this process dials it hears too: a peer named by a flag may have a name for an address.
        """
        self._links.add(link)
        if dialed:
            self._dialed_hosts[dialed] = host
        elif not self._knows(host):
            self._refuse(host)
            return False
        return len(self._links) <= _MAX_LINKS

    def _refuse(self, host: str) -> None:
        """Count each stranger, and name one now and then: who connects without end must not write the log."""
        self._on_refused()
        if times := self._refusals.count():
            _log.warning(
                "connection refused: no gateway of this namespace is known there", host=host, times=times
            )

    def _knows(self, host: str) -> bool:
        known = host in self._hosts or host in self._dialed_hosts.values()
        return known or host in _LOOPBACK or self._any_host

    def set_hosts(self, hosts: frozenset[str]) -> None:
        """Addresses of this namespace's gateways, as the API server told them: nobody else is heard."""
        for host in hosts - self._hosts:
            _log.info("peer", host=host)
        self._hosts = hosts

    def on_link_lost(self, link: PeerLink) -> None:
        """A connection closed."""
        self._links.discard(link)
        self._outgoing.discard(link)

    def on_message(self, message: bytes) -> list[bytes]:
        """Apply a peer's message; what to answer.

        Raises:
            WireError: it is no message.
        """
        return [answer.data for answer in self.shared.receive(message, self._clock())]

    # Time.

    async def run(self, host: str, port: int, *, reuse_port: bool = False) -> None:
        """Serve peers and send what was decided, until cancelled."""
        server = await asyncio.get_running_loop().create_server(
            lambda: PeerLink(self), host, port, reuse_port=reuse_port or None
        )
        beat_at = self._clock()
        try:
            while True:
                await asyncio.sleep(FLUSH_SECONDS)
                now = self._clock()
                messages = self.shared.flush()
                if now >= beat_at:
                    beat_at = now + _HEARTBEAT_SECONDS
                    messages += self.shared.heartbeat()
                    self._look_for_partition(now)
                for message in messages:
                    self._broadcast(message)
        finally:
            server.close()
            self.close()

    def _broadcast(self, message: bytes) -> None:
        for link in list(self._outgoing):
            link.send(message)
            self.num_bytes += len(message) + 4

    def _look_for_partition(self, now: float) -> None:
        """While listed peers are unheard, own load has to stand for theirs."""
        self.shared.expire(now)
        short = len(self._dialers) - self.shared.num_live_peers()
        if short <= 0:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now
        missing = (
            short if self._short_since is not None and now - self._short_since > _PARTITION_SECONDS else 0
        )
        if missing == self._num_missing:
            return
        _log.warning("peers", listed=len(self._dialers), missing=missing)
        self._num_missing = missing
        for router in self._routers.values():
            router.set_partition(1 + missing)

    def close(self) -> None:
        """Cut every connection and stop dialing."""
        for task in self._dialers.values():
            task.cancel()
        self._dialers.clear()
        for link in list(self._links):
            with contextlib.suppress(RuntimeError):
                link.close()
