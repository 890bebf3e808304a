"""One connection to an engine: sends a request, reads its answer, keeps itself for the next one."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from typing import Final, Protocol, cast

import httptools

from millpond_gateway.proxy.errors import BadAnswerError
from millpond_gateway.proxy.records import AnswerHead, Breakage, Header

_MAX_ANSWER_HEAD_BYTES: Final = 65_536
_BYTES_ACKED_AT: Final = 120
"""Offset of `tcpi_bytes_acked` in Linux's `struct tcp_info`, 64-bit."""


class AnswerSink(Protocol):
    """Whoever waits for an answer; told `on_end` or `on_broken` exactly once."""

    def on_head(self, head: AnswerHead) -> None: ...

    def on_data(self, data: bytes) -> None: ...

    def on_read(self) -> None:
        """Everything of one read has been told, and more is to come."""

    def on_end(self) -> None: ...

    def on_broken(self, breakage: Breakage) -> None: ...


class ConnectionOwner(Protocol):
    """Keeps connections between requests."""

    def on_free(self, connection: EngineConnection) -> None: ...

    def on_closed(self, connection: EngineConnection) -> None: ...


class EngineConnection:
    """Client side of HTTP/1.1 over one TCP connection, one request at a time.

    An `asyncio.Protocol` in all but the base class, as `ClientConnection` is.
    """

    __slots__ = (
        "_complete",
        "_data",
        "_fields",
        "_head_bytes",
        "_in_head",
        "_keep",
        "_message_began",
        "_nothing_accepted",
        "_owner",
        "_parser",
        "_sent_before",
        "_sent_bytes",
        "_sink",
        "_transport",
        "_until_close",
        "answered",
        "idle_since",
        "key",
        "served",
    )

    def __init__(self, owner: ConnectionOwner, key: str) -> None:
        self._owner = owner
        self.key = key
        """Which endpoint this connection leads to."""
        self.served = 0
        """Requests sent over it."""
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._sink: AnswerSink | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._sent_bytes = self._sent_before = 0
        self._nothing_accepted = False
        self._message_began = False
        self._reset()

    def _reset(self) -> None:
        self.answered = False
        self._fields: list[Header] = []
        self._data: list[bytes] = []
        self._head_bytes = 0
        self._in_head = True
        self._complete = self._keep = self._until_close = False

    @property
    def usable(self) -> bool:
        """Open, and not known to be closing."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, sink: AnswerSink, data: bytes) -> None:
        """Send one whole request; its answer goes to `sink`."""
        assert self._sink is None
        assert self._transport is not None
        self._sink = sink
        self._reset()
        self.served += 1
        self._sent_before = self._sent_bytes
        self._sent_bytes += len(data)
        self._transport.write(data)

    def cancel(self) -> None:
        """Close at once and report nothing: the engine stops the request when its connection ends."""
        self._sink = None
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close an unused connection."""
        self._sink = None
        if self._transport is not None:
            self._transport.close()

    def pause(self) -> None:
        """Stop reading until `resume`: the client is slower than the engine."""
        if self.usable and self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self.usable and self._transport is not None:
            self._transport.resume_reading()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but name
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        sink = self._sink
        if sink is None:
            self._drop_idle()
            return
        self.answered = True
        try:
            self._parser.feed_data(data)
            self._check_head(len(data))
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, BadAnswerError) as error:
            self._break(f"the engine's answer is no valid HTTP/1.1: {error}", bad_answer=True)
            return
        if self._data and self._sink is sink:
            body = self._data
            self._data = []
            sink.on_data(body[0] if len(body) == 1 else b"".join(body))
        if self._sink is sink:
            if self._complete:
                self._finish(sink)
            else:
                sink.on_read()

    def eof_received(self) -> bool:
        if self._sink is not None and not self.answered:
            self._nothing_accepted = self._accepted_nothing()
        return False  # the transport closes itself

    def connection_lost(self, exc: Exception | None) -> None:
        sink, self._sink = self._sink, None
        self._transport = None
        self._owner.on_closed(self)
        if sink is None:
            return
        if self._until_close and exc is None:
            sink.on_end()
            return
        message = f"the engine's connection broke: {exc}" if exc else "the engine closed the connection"
        sink.on_broken(Breakage(message, self.answered, self._nothing_accepted))

    def pause_writing(self) -> None:
        """Nothing to do: the request was written whole, and waits in the transport."""

    def resume_writing(self) -> None:
        """As above."""

    # Called by the parser.

    def on_message_begin(self) -> None:
        if self._complete:
            raise BadAnswerError("a second answer to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            self._fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            if status == 101:
                raise BadAnswerError("an upgrade nobody asked for")
            self._fields = []
            return  # an interim answer
        self._in_head = False
        head = make_answer_head(status, self._fields)
        self._keep = self._parser.should_keep_alive()
        self._until_close = head.content_length is None and not head.chunked and status not in {204, 304}
        assert self._sink is not None
        self._sink.on_head(head)

    def on_body(self, data: bytes) -> None:
        self._data.append(data)

    def on_message_complete(self) -> None:
        if not self._in_head:
            self._complete = True

    # Own steps.

    def _check_head(self, num_bytes: int) -> None:
        if self._in_head:
            self._head_bytes += num_bytes
            if self._head_bytes > _MAX_ANSWER_HEAD_BYTES:
                raise BadAnswerError("the head is too large")

    def _finish(self, sink: AnswerSink) -> None:
        self._sink = None
        if self._keep and self.usable:
            self._owner.on_free(self)
        else:
            self.close()
        sink.on_end()

    def _break(self, message: str, *, bad_answer: bool) -> None:
        sink = self._sink
        self.cancel()
        if sink is not None:
            sink.on_broken(Breakage(message, answered=True, nothing_accepted=False, bad_answer=bad_answer))

    def _drop_idle(self) -> None:
        """Bytes nobody asked for: the next answer on this connection could not be trusted."""
        self.close()

    def _accepted_nothing(self) -> bool:
        """Whether the other host had acknowledged no byte of the current request when it closed.

        Its FIN acknowledges what it took before; once closed it takes nothing more, so what is not acknowledged
        by then never reached the engine.
        """
        assert self._transport is not None
        accepted = count_accepted_bytes(self._transport.get_extra_info("socket"))
        return accepted is not None and accepted <= self._sent_before


def make_answer_head(status: int, fields: list[Header]) -> AnswerHead:
    """Framing of an answer from its headers; the parser has checked that they do not contradict."""
    length: int | None = None
    chunked = False
    for name, value in fields:
        if name == b"content-length":
            length = int(value)
        elif name == b"transfer-encoding":
            chunked = value.strip().lower().endswith(b"chunked")
    return AnswerHead(status, fields, None if chunked else length, chunked)


def count_accepted_bytes(sock: socket.socket | None) -> int | None:
    """Bytes of a TCP connection that the other host acknowledged; None where the system does not tell."""
    if sock is None or not hasattr(socket, "TCP_INFO") or sys.platform != "linux":
        return None
    try:
        with socket.socket(fileno=os.dup(sock.fileno())) as copy:
            info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
    except OSError:
        return None
    if len(info) < _BYTES_ACKED_AT + 8:
        return None
    acknowledged = int.from_bytes(info[_BYTES_ACKED_AT : _BYTES_ACKED_AT + 8], sys.byteorder)
    return max(0, acknowledged - 1)  # the connection's SYN counts as one
