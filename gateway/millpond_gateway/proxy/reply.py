"""The answer to one client: head, body framing, comments, and how it ends when something breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from millpond_common.contract.openai import ApiError
from millpond_gateway.proxy import headers
from millpond_gateway.proxy.hidden import UsageFilter
from millpond_gateway.proxy.records import AnswerHead, Header
from millpond_gateway.proxy.sse import COMMENT, StreamTail
from millpond_gateway.routing.records import Usage

_STREAM_HEADERS: Final[list[Header]] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]


class Reply:
    """Writes one answer; the caller sees to order and calls `end`, `refuse` or `break_off` once."""

    __slots__ = (
        "_chunked",
        "_close",
        "_filter",
        "_http_1_1",
        "_is_stream",
        "_out",
        "_request_id",
        "_tail",
        "_transport",
        "_without_body",
        "begun",
        "bytes_out",
        "clean",
        "early",
        "ended",
        "num_events",
        "status",
    )

    def __init__(
        self,
        transport: asyncio.Transport,
        *,
        request_id: bytes,
        http_1_1: bool,
        close: bool,
        without_body: bool = False,
        hides_usage: bool = False,
    ) -> None:
        self._filter = UsageFilter() if hides_usage else None
        self.num_events = 0
        """Events of the stream so far: about as many as tokens."""
        self._transport = transport
        self._request_id = request_id
        self._http_1_1 = http_1_1
        self._close = close
        self._without_body = without_body
        self._chunked = False
        self._is_stream = False
        self._tail = StreamTail()
        self._out: list[bytes] = []
        self.begun = self.ended = self.clean = self.early = False
        """`early`: the head was sent before the engine's; `clean`: the next request may follow."""
        self.status = 0
        self.bytes_out = 0

    @property
    def close(self) -> bool:
        """The connection ends after this answer."""
        return self._close or not self.clean

    def close_after(self) -> None:
        """End the connection with this answer."""
        self._close = True

    @property
    def at_boundary(self) -> bool:
        """No event is half sent."""
        return self._tail.at_boundary if self._filter is None else self._filter.at_boundary

    @property
    def is_stream(self) -> bool:
        """The answer is a stream of server-sent events."""
        return self._is_stream

    @property
    def said_done(self) -> bool:
        """The stream said `[DONE]`."""
        return self._tail.done

    @property
    def said_error(self) -> bool:
        """The stream carried an error event of the engine's own."""
        return self._tail.failed

    def find_usage(self) -> Usage | None:
        """What the engine counted."""
        return self._tail.find_usage()

    def begin(self, head: AnswerHead, debug: Iterable[Header] = ()) -> None:
        """Send the engine's head, with the framing this client understands."""
        content_type = headers.find_header(head.headers, b"content-type") or b""
        self._is_stream = content_type.startswith(b"text/event-stream")
        bodyless = head.status in {204, 304}
        self._chunked = self._http_1_1 and head.content_length is None and not bodyless
        self._close = self._close or (head.content_length is None and not self._chunked and not bodyless)
        self._send_head(head.status, head.headers, head.content_length, debug)

    def begin_early(self) -> None:
        """Commit to a stream before the engine did, so that comments can keep the connection alive."""
        self.early = self._is_stream = True
        self._chunked = self._http_1_1
        self._close = self._close or not self._chunked
        self._send_head(200, _STREAM_HEADERS, None, ())

    def _send_head(
        self, status: int, fields: list[Header], content_length: int | None, debug: Iterable[Header]
    ) -> None:
        self.begun = True
        self.status = status
        self._out.append(
            headers.make_client_head(
                status,
                fields,
                request_id=self._request_id,
                content_length=content_length,
                chunked=self._chunked,
                close=self._close,
                debug=debug,
            )
        )

    def write(self, data: bytes) -> None:
        """Pass bytes of the engine's answer on; they leave with the next `flush`, at the end of the read."""
        if not self._is_stream:
            self._tail.feed_plain(data)
            self._write(data)
            return
        self._tail.feed(data)
        self.num_events += data.count(b"\n\n")
        if self._filter is not None:
            data = self._filter.feed(data)
        if data:
            self._write(data)

    def _write(self, data: bytes) -> None:
        self.bytes_out += len(data)
        self._out.append(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def flush(self) -> None:
        """Send what has gathered: one system call per read of the engine, whatever the read held."""
        out = self._out
        if out:
            self._out = []
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))

    def comment(self) -> None:
        """Say that the stream lives; only between events."""
        if self._is_stream and self.at_boundary:
            self._write(COMMENT)
        self.flush()

    def end(self) -> None:
        """The answer is complete."""
        self.ended = self.clean = True
        if self._filter is not None and (rest := self._filter.take_rest()):
            self._write(rest)
        if self._chunked:
            self._out.append(b"0\r\n\r\n")
        self.flush()

    def refuse(self, error: ApiError, *, reason: str = "", close: bool = False) -> None:
        """Answer with an error of the gateway, in whatever way the answer's state still allows."""
        if self.begun:
            self.break_off(error)
            return
        self.begun = self.ended = self.clean = True
        self.status = error.status
        self._close = self._close or close
        self._transport.write(
            headers.make_error_answer(
                error,
                request_id=self._request_id,
                close=self._close,
                reason=reason,
                without_body=self._without_body,
            )
        )

    def answer(self, status: int, body: bytes) -> None:
        """Answer with JSON of the gateway."""
        self.begun = self.ended = self.clean = True
        self.status = status
        self.bytes_out = len(body)
        self._transport.write(
            headers.make_answer(
                status, body, request_id=self._request_id, close=self._close, without_body=self._without_body
            )
        )

    def break_off(self, error: ApiError) -> None:
        """End a begun answer so that nobody takes it for complete.

        A stream gets the error event and no end of its framing. When an event was half sent, nothing can be
        added to it that a client would read as an error, so the connection just breaks, as for any other body.
        """
        self.ended = True
        if self._is_stream and self.at_boundary:
            self._write(error.to_event())
            self.flush()
            self._transport.close()
        else:
            self._transport.abort()

    def break_off_with(self, body: bytes) -> None:
        """End a stream that began early with the engine's own error body as its error event."""
        self.ended = True
        line = b" ".join(body.splitlines())
        self._write(b"event: error\ndata: " + line + b"\n\n")
        self.flush()
        self._transport.close()
