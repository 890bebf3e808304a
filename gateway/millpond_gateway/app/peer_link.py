"""One connection between two gateway processes: frames of four bytes' length, big-endian, and a message."""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

from millpond_gateway.app.channel import (
    MAC_BYTES,
    MAX_GREETING_BYTES,
    Channel,
    PeerIdentity,
    PeerRefusedError,
    Refusal,
)
from millpond_gateway.routing.wire import MAX_MESSAGE_BYTES, ForeignOriginError, WireError

_MAX_UNSENT_BYTES = 8 * 1024 * 1024


class LinkHub(Protocol):
    """What a link needs of whoever holds all links."""

    def on_link(self, link: PeerLink, host: str, *, dialed: str = "") -> bool:
        """A connection opened; False to end it."""

    def on_ready(self, link: PeerLink) -> None:
        """The other end may be told decisions and is heard."""

    def on_link_lost(self, link: PeerLink) -> None:
        """A connection closed."""

    def on_message(self, message: bytes, sender: PeerIdentity | None) -> list[bytes]:
        """Apply a message; what to answer."""

    def refuse(self, host: str, reason: str) -> None:
        """A connection, or what came over it, was refused."""


class PeerLink(asyncio.Protocol):
    """One connection to or from a peer; without a channel whoever is at the other end is believed."""

    def __init__(self, mesh: LinkHub, dialed: str = "", channel: Channel | None = None) -> None:
        self._mesh = mesh
        self._dialed = dialed
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._ignoring = False
        self.channel = channel
        self.host = ""
        self.ready = False
        """Both ends have proved who they are, where they must."""
        self.closed = asyncio.Event()

    @property
    def dialed(self) -> str:
        """Address that this process called; empty where it was called."""
        return self._dialed

    @property
    def ignored(self) -> bool:
        """Refused, and left open until its time is up: a gateway of a former version would call again at once."""
        return self._ignoring

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but name
        peer = transport.get_extra_info("peername")
        self.host = peer[0].removeprefix("::ffff:") if peer else ""
        if not self._mesh.on_link(self, self.host, dialed=self._dialed):
            self._transport.abort()
        elif self.channel is None:
            self._become_ready()
        elif self._dialed:
            self._write(self.channel.greet())

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._mesh.on_link_lost(self)
        self.closed.set()

    def data_received(self, data: bytes) -> None:
        if self._ignoring:
            return
        self._buffer += data
        try:
            while (frame := self._take_frame()) is not None:
                self._take(frame)
        except PeerRefusedError as error:
            self._refuse(error.reason)
        except ForeignOriginError:
            self._refuse(Refusal.FOREIGN_ORIGIN)
        except WireError:
            self._refuse(Refusal.NO_MESSAGE)

    def _take_frame(self) -> bytes | None:
        """The next whole frame of the buffer.

        Raises:
            WireError, PeerRefusedError: it would be too long.
        """
        if self._transport is None or len(self._buffer) < 4:
            return None
        size = int.from_bytes(self._buffer[:4], "big")
        if self.channel is not None and self.channel.key is None and size > MAX_GREETING_BYTES:
            raise PeerRefusedError(Refusal.NO_PROOF, "no greeting of a gateway with a key")
        if size > MAX_MESSAGE_BYTES + MAC_BYTES:
            raise WireError(f"a frame of {size} bytes")
        if len(self._buffer) < 4 + size:
            return None
        frame, self._buffer = self._buffer[4 : 4 + size], self._buffer[4 + size :]
        return frame

    def _take(self, frame: bytes) -> None:
        message: bytes | None = frame
        sender: PeerIdentity | None = None
        if self.channel is not None:
            message, answers = self.channel.receive(frame)
            for answer in answers:
                self._write(answer)
            if self.channel.proved and not self.ready:
                self._become_ready()
            sender = self.channel.peer
        if message is not None:
            for answer in self._mesh.on_message(message, sender):
                self.send(answer)

    def _become_ready(self) -> None:
        self.ready = True
        self._mesh.on_ready(self)

    def _refuse(self, reason: str) -> None:
        self._mesh.refuse(self.host, reason)
        if reason == Refusal.NO_PROOF and not self._dialed:
            self._ignoring = True
            self._buffer = b""
        else:
            self.close()

    def send(self, message: bytes) -> None:
        """Send one message; a peer that is too far behind is cut off."""
        transport = self._transport
        if transport is None or not self.ready:
            return
        if transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            transport.abort()
            return
        self._write(message if self.channel is None else self.channel.seal(message))

    def _write(self, frame: bytes) -> None:
        if self._transport is not None:
            self._transport.write(len(frame).to_bytes(4, "big") + frame)

    def close(self) -> None:
        """Cut the connection."""
        if self._transport is not None:
            self._transport.abort()
