"""One client connection: reads requests, one at a time, and gives each to an exchange."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, cast

from millpond_common.contract.openai import ApiError, ErrorCode
from millpond_common.half_closed import has_left
from millpond_gateway.proxy import headers
from millpond_gateway.proxy.dispatch import Caller
from millpond_gateway.proxy.errors import BadRequestError
from millpond_gateway.proxy.exchange import Exchange
from millpond_gateway.proxy.http1 import RequestReader

if TYPE_CHECKING:
    from millpond_gateway.proxy.relay import Relay

_LEAVING_IDLE_SECONDS: Final = 1.0
"""A leaving gateway keeps a connection this long after an answer that had promised to keep it: the next request may be on
its way already."""
_LINGER_SECONDS: Final = 2.0


class ClientConnection:
    """Server side of HTTP/1.1 over one TCP connection.

    While a request is answered its connection keeps being read, so that a client's leaving is seen at once;
    bytes of a further request are not kept: the connection ends after the answer and the client repeats them.

    An `asyncio.Protocol` in all but the base class: compiled, a class of an interpreted base is slower.
    """

    __slots__ = (
        "_admitted",
        "_announced",
        "_caller",
        "_exchange",
        "_half_closed",
        "_lingering",
        "_paused_at",
        "_reader",
        "_relay",
        "_since",
        "_transport",
        "address",
    )

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._reader = RequestReader(relay.settings)
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._caller: Caller | None = None
        self._announced = 0
        self._admitted = False
        self._lingering = False
        self._half_closed = False
        self._paused_at: float | None = None
        self._since = relay.now()
        self.address = ""
        """Where the client connected from."""

    @property
    def unsent_bytes(self) -> int:
        """Bytes the client has not taken yet."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but name
        self._transport = transport
        peer = transport.get_extra_info("peername")
        self.address = peer[0] if peer else ""
        transport.set_write_buffer_limits(high=self._relay.settings.write_buffer_bytes)
        if not self._relay.on_client(self):
            self._refuse(
                ApiError(ErrorCode.OVERLOADED, "the gateway has too many connections", retry_after_seconds=1)
            )

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            return
        reader = self._reader
        if not reader.started:
            self._since = self._relay.now()
        try:
            reader.feed(data)
        except BadRequestError as error:
            if self._exchange is None:
                self._refuse(error.error)
            else:
                reader.pipelined = True
            return
        if self._exchange is not None:
            return
        if reader.head is not None and not self._admitted and not self._admit():
            return
        if self._admitted and not self._count_body():
            return
        if reader.complete:
            self._start()

    def _admit(self) -> bool:
        """Check what can be checked before the body is read."""
        head = self._reader.head
        assert head is not None
        self._since = self._relay.now()
        answer = self._relay.check_head(head)
        if isinstance(answer, ApiError):
            self._refuse(answer, allow=self._relay.allowed_methods(head))
            return False
        self._caller = answer
        self._admitted = True
        if not self._reserve_body(head.content_length or 0):
            return False
        if head.expects_continue and not self._reader.complete and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    def _count_body(self) -> bool:
        """Account for a body of unannounced length as it comes."""
        return self._reader.body_bytes <= self._announced or self._reserve_body(
            self._reader.body_bytes - self._announced
        )

    def _reserve_body(self, num_bytes: int) -> bool:
        if not self._relay.take_body(num_bytes):
            self._refuse(
                ApiError(
                    ErrorCode.OVERLOADED, "the gateway holds too many request bodies", retry_after_seconds=1
                )
            )
            return False
        self._announced += num_bytes
        return True

    def _start(self) -> None:
        head, caller, transport = self._reader.head, self._caller, self._transport
        assert head is not None
        assert caller is not None
        assert transport is not None
        body = self._reader.take_body()
        exchange = self._relay.start(self, transport, head, caller, body, pipelined=self._reader.pipelined)
        self._announced = (
            0  # the exchange gives the bytes back; an error on the way here leaves them to this client
        )
        self._exchange = exchange
        if self._exchange is not None:
            self._exchange.decide()

    def on_answered(self, *, close: bool) -> None:
        """The exchange ended; read the next request, or close."""
        self._exchange = None
        self._since = self._relay.now()
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if close or self._reader.pipelined:
            self._linger()
            return
        self._admitted = False
        self._caller = None
        self._reader.restart()

    def eof_received(self) -> bool:
        """Answer a client that only stopped sending; find out at once whether it left instead.

        Both look the same until something is sent: a host whose program is gone answers that with a reset. Before
        the answer begins an interim one is sent, which HTTP/1.0 does not know: there the end means leaving.
        """
        exchange, head, transport = self._exchange, self._reader.head, self._transport
        if exchange is None or head is None or transport is None or not head.http_1_1:
            return False
        self._half_closed = True
        self._reader.pipelined = True  # nothing can follow: the connection ends with the answer
        if not exchange.poke():
            transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._relay.on_client_lost(self)
        self._give_announced_back()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.on_client_gone()

    def pause_writing(self) -> None:
        self._paused_at = self._relay.now()
        if self._exchange is not None:
            self._exchange.on_client_slow()

    def resume_writing(self) -> None:
        self._paused_at = None
        if self._exchange is not None:
            self._exchange.on_client_ready()

    def check(self, now: float) -> None:
        """Enforce the deadlines of this connection and of its request."""
        settings = self._relay.settings
        age = now - self._since
        if self._has_gone(now):
            self.abort()
        elif self._exchange is not None:
            self._exchange.check(now, paused=self._paused_at is not None)
        elif self._lingering:
            if age > _LINGER_SECONDS:
                self.abort()
        elif self._admitted:
            if age > settings.body_seconds:
                self._refuse(ApiError(ErrorCode.REQUEST_TIMEOUT, "the request body did not arrive in time"))
        elif self._reader.started:
            if age > settings.head_seconds:
                self._refuse(ApiError(ErrorCode.REQUEST_TIMEOUT, "the request head did not arrive in time"))
        elif age > (_LEAVING_IDLE_SECONDS if self._relay.leaving else settings.client_idle_seconds):
            self.close()

    def _has_gone(self, now: float) -> bool:
        """The client reset the half it had left open, or has read nothing for too long."""
        if self._half_closed and self._transport is not None and has_left(self._transport):
            return True
        stalled = self._relay.settings.stalled_client_seconds
        return self._paused_at is not None and now - self._paused_at > stalled

    def shut_down(self) -> None:
        """End an open request because the grace is over."""
        if self._exchange is not None:
            self._exchange.shut_down()
        self.close()

    def close(self) -> None:
        """Close after what is written has gone out."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Cut off."""
        if self._transport is not None:
            self._transport.abort()

    def _refuse(self, error: ApiError, *, allow: bytes = b"") -> None:
        """Answer before the request is understood, then close: what follows it cannot be trusted."""
        transport = self._transport
        if transport is None:
            return
        head = self._reader.head
        request_id = self._relay.choose_request_id(head)
        without_body = head is not None and head.method == b"HEAD"
        transport.write(
            headers.make_error_answer(
                error, request_id=request_id, close=True, allow=allow, without_body=without_body
            )
        )
        self._relay.on_refused(head, request_id, error)
        self._give_announced_back()
        self._linger()

    def _linger(self) -> None:
        """Close so that the client can read the answer: a close with unread bytes would reset the connection."""
        self._lingering = True
        self._since = self._relay.now()
        transport = self._transport
        if transport is None:
            return
        if transport.can_write_eof() and not self._half_closed:
            transport.write_eof()
        else:
            transport.close()

    def _give_announced_back(self) -> None:
        if self._announced:
            self._relay.give_body_back(self._announced)
            self._announced = 0
