"""Transport of shared decisions: a mesh of TCP connections among the gateway processes of a namespace.

Frames carry messages of `routing.wire`, sealed where the gateways have a key (`channel`). Every process connects to every
peer it knows and accepts connections from peers; answers go back on the connection that asked. A peer that reads
too slowly loses its connection, not this process its memory: the digests heal what it missed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from millpond_common.pace import Pace
from millpond_gateway.app.channel import Channel, PeerIdentity, Refusal
from millpond_gateway.app.peer_keys import PeerKeys
from millpond_gateway.app.peer_link import PeerLink
from millpond_gateway.proxy.connections import split_address
from millpond_gateway.routing.router import Router
from millpond_gateway.routing.shared import SharedDecisions

_log = structlog.get_logger("peers")
FLUSH_SECONDS = 0.01
_HEARTBEAT_SECONDS = 1.0
_CONNECT_SECONDS = 2.0
_FIRST_PAUSE_SECONDS = 0.1
_MAX_PAUSE_SECONDS = 5.0
_MAX_REFUSED_PAUSE_SECONDS = 15.0
"""Where the other end answers and refuses: a gateway of a former version writes a line for each try."""
_PROOF_SECONDS = 5.0
_MAX_LINKS = 256
_MAX_UNPROVED_LINKS = 64
_LOOPBACK = frozenset({"127.0.0.1", "::1"})
"""Other workers of this pod, and whoever else shares its network namespace."""
_TELL_SECONDS = 10.0
_LASTED_SECONDS = 1.0
_EXPLANATIONS = {
    Refusal.UNKNOWN_ADDRESS: "no gateway of this namespace is known there",
    Refusal.NO_PROOF: "it shows no key: a gateway of a former version, or one without --peer-key-file, or a stranger",
    Refusal.UNKNOWN_KEY: "it has another key: wait until both have read the same Secret, or a stranger",
    Refusal.BAD_SEAL: "what it sent is forged, changed, or recorded elsewhere",
    Refusal.FOREIGN_ORIGIN: "it speaks as another gateway than it proved to be",
    Refusal.NO_MESSAGE: "what it sent is no message of this version",
}
_PARTITION_SECONDS = 3.0
"""Peers that are listed and yet unheard for longer count as cut off."""


class PeerMesh:
    """All links of one process, and the clock of what goes out over them."""

    def __init__(
        self,
        shared: SharedDecisions,
        clock: Callable[[], float],
        *,
        keys: PeerKeys | None = None,
        any_host: bool = False,
        on_refused: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        """`keys` None believes whoever speaks from a known address."""
        self._keys = keys
        self._any_host = any_host
        self._on_refused = on_refused
        self.shared = shared
        self._clock = clock
        self._links: set[PeerLink] = set()
        self._dialers: dict[str, asyncio.Task[None]] = {}
        self._outgoing: set[PeerLink] = set()
        self._unproved: dict[PeerLink, float] = {}
        """Since when; the oldest first."""
        self._routers: dict[str, Router] = {}
        self._short_since: float | None = None
        self._refusals: dict[str, Pace] = {}
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
        pause = _FIRST_PAUSE_SECONDS
        link: PeerLink | None = None
        try:
            while True:
                limit = _MAX_PAUSE_SECONDS
                began = self._clock()
                try:
                    async with asyncio.timeout(_CONNECT_SECONDS):
                        _, link = await loop.create_connection(lambda: self.make_link(address), host, port)
                except OSError:
                    pass
                else:
                    await link.closed.wait()
                    limit = _MAX_PAUSE_SECONDS if link.ready else _MAX_REFUSED_PAUSE_SECONDS
                    if link.ready and self._clock() - began > _LASTED_SECONDS:
                        pause = _FIRST_PAUSE_SECONDS
                await asyncio.sleep(min(pause, limit))
                pause = min(2 * pause, limit)
        finally:
            if link is not None:
                link.close()

    def make_link(self, dialed: str = "") -> PeerLink:
        """The protocol of one connection."""
        keys = self._keys
        me = PeerIdentity(self.shared.origin, self.shared.epoch)
        return PeerLink(self, dialed, Channel(me, keys.current) if keys is not None else None)

    def on_link(self, link: PeerLink, host: str, *, dialed: str = "") -> bool:
        """A connection opened; False when there are too many, or it comes from where no gateway is known.

        Whom this process dials it hears too: a peer named by a flag may have a name for an address.
        """
        self._links.add(link)
        if dialed:
            self._dialed_hosts[dialed] = host
        elif not self._knows(host):
            self.refuse(host, Refusal.UNKNOWN_ADDRESS)
            return False
        if link.channel is not None:
            self._unproved[link] = self._clock()
            if (
                len(self._unproved) > _MAX_UNPROVED_LINKS
            ):  # a proof takes two round trips: the oldest will not come
                next(iter(self._unproved)).close()
        return len(self._links) <= _MAX_LINKS

    def on_ready(self, link: PeerLink) -> None:
        """The other end may be told decisions and is heard."""
        self._unproved.pop(link, None)
        if link.dialed:
            self._outgoing.add(link)
            for message in self.shared.heartbeat():
                self._broadcast(message)

    def refuse(self, host: str, reason: str) -> None:
        """Count each refusal, and tell one now and then: who connects without end must not write the log."""
        self._on_refused(reason)
        pace = self._refusals.setdefault(reason, Pace(_TELL_SECONDS, self._clock))
        if times := pace.count():
            _log.warning("peer refused", host=host, reason=reason, why=_EXPLANATIONS[reason], times=times)

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
        self._unproved.pop(link, None)

    def on_message(self, message: bytes, sender: PeerIdentity | None) -> list[bytes]:
        """Apply a peer's message; what to answer. With a sender it must be that one's own.

        Raises:
            WireError: it is no message, or somebody else's.
        """
        return [answer.data for answer in self.shared.receive(message, self._clock(), sender=sender)]

    # Time.

    async def run(self, host: str, port: int, *, reuse_port: bool = False) -> None:
        """Serve peers and send what was decided, until cancelled."""
        self._look_at_keys()
        server = await asyncio.get_running_loop().create_server(
            self.make_link, host, port, reuse_port=reuse_port or None
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
                    self._look_at_keys()
                    self._end_unproved(now)
                for message in messages:
                    self._broadcast(message)
        finally:
            server.close()
            self.close()

    def _look_at_keys(self) -> None:
        """Follow a changed file; a connection under a key that counts no more begins anew under another."""
        keys = self._keys
        if keys is None or not keys.look():
            return
        for link in list(self._links):
            if (
                link.channel is not None
                and link.channel.key is not None
                and link.channel.key not in keys.current
            ):
                link.close()

    def _end_unproved(self, now: float) -> None:
        for link, since in list(self._unproved.items()):
            if now - since <= _PROOF_SECONDS:
                break
            if not link.ignored and not link.dialed:
                self.refuse(link.host, Refusal.NO_PROOF)
            link.close()

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
