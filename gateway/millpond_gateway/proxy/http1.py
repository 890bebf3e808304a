"""Reading HTTP/1.1 requests: bytes in, one validated request at a time out. No I/O.

httptools (llhttp) finds the structure and refuses bad chunking, obsolete folding, bare line feeds and a
Content-Length beside Transfer-Encoding; this module adds the limits and what a relay must not let through.
"""

from __future__ import annotations

from typing import Final

import httptools

from millpond_common.contract.openai import ApiError, ErrorCode
from millpond_gateway.proxy.errors import BadRequestError
from millpond_gateway.proxy.records import Header, RequestHead
from millpond_gateway.proxy.settings import RelaySettings

_FRAMING_PER_BYTE: Final = 16
"""A body in chunks of one byte is six times its size; extensions of chunks, which nobody reads, have no end of their own."""


class RequestReader:
    """Collects requests from one connection's bytes.

    After each `feed` look at `head` (set once the head is valid) and `complete`. A second request that
    arrives before `restart` is not read: `pipelined` says so, and the connection ends after the answer.
    """

    __slots__ = (
        "_body",
        "_chunked_bytes",
        "_fields",
        "_head_bytes",
        "_limits",
        "_num_trailers",
        "_parser",
        "_target",
        "_trailer_bytes",
        "body_bytes",
        "complete",
        "head",
        "pipelined",
        "started",
    )

    def __init__(self, limits: RelaySettings) -> None:
        self._limits = limits
        self._parser = httptools.HttpRequestParser(self)
        self.pipelined = False
        self._clear()

    def _clear(self) -> None:
        self.head: RequestHead | None = None
        self.complete = False
        self.started = False
        self.body_bytes = 0
        self._head_bytes = self._chunked_bytes = 0
        self._num_trailers = self._trailer_bytes = 0
        self._target = b""
        self._fields: list[Header] = []
        self._body: list[bytes] = []

    def restart(self) -> None:
        """Forget the answered request; the next bytes begin another."""
        self._clear()

    def take_body(self) -> bytes:
        """The collected body; it is not kept here."""
        parts, self._body = self._body, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def feed(self, data: bytes) -> None:
        """Read more bytes.

        Raises:
            BadRequestError: with the answer to send before closing.
        """
        if self.complete:
            self.pipelined = True
            return
        if self.head is None:
            self._head_bytes += len(data)
        elif self.head.chunked:
            self._chunked_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._continue_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError as error:
            raise _cause(error) from error
        except httptools.HttpParserError as error:
            raise _refuse(f"not a valid HTTP/1.1 request: {error}") from error
        if self.head is None and self._head_bytes > self._limits.max_head_bytes:
            raise _refuse("the request head is too large", ErrorCode.HEAD_TOO_LARGE)
        if self._chunked_bytes > _FRAMING_PER_BYTE * self.body_bytes + self._limits.max_head_bytes:
            raise _refuse("the chunks of the body are more framing than body")

    def _continue_without_upgrade(self, rest: bytes) -> None:
        """A server may ignore `Upgrade`; the parser stops there, so a fresh one reads the body."""
        head, fields = self.head, self._fields
        if head is None or head.method == b"CONNECT":
            raise _refuse("CONNECT is not served here", ErrorCode.METHOD_NOT_ALLOWED)
        self._parser = httptools.HttpRequestParser(self)
        framing = (
            b"transfer-encoding: chunked"
            if head.chunked
            else b"content-length: %d" % (head.content_length or 0)
        )
        self._clear()
        self._parser.feed_data(b"POST / HTTP/1.1\r\nhost: a\r\n%b\r\n\r\n" % framing)
        self.head, self._fields = head, fields
        if rest:
            self.feed(rest)

    # Called by the parser.

    def on_message_begin(self) -> None:
        if self.complete:
            self.pipelined = True
        self.started = True

    def on_url(self, url: bytes) -> None:
        if self.complete:
            return
        self._target += url
        if len(self._target) > self._limits.max_target_bytes:
            raise _refuse("the request target is too long", ErrorCode.HEAD_TOO_LARGE)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.head is not None:
            if not self.complete:  # a trailer; a pipelined request's head is not read at all
                self._count_trailer(len(name) + len(value))
            return  # neither goes on
        self._fields.append((name.lower(), value))
        if len(self._fields) > self._limits.max_headers:
            raise _refuse("too many headers", ErrorCode.HEAD_TOO_LARGE)

    def _count_trailer(self, num_bytes: int) -> None:
        self._num_trailers += 1
        self._trailer_bytes += num_bytes
        limits = self._limits
        if self._num_trailers > limits.max_headers or self._trailer_bytes > limits.max_head_bytes:
            raise _refuse("too many trailers", ErrorCode.HEAD_TOO_LARGE)

    def on_headers_complete(self) -> None:
        if self.complete:
            return
        limit = self._limits.max_head_bytes
        if self._head_bytes > limit and sum(len(name) + len(value) for name, value in self._fields) > limit:
            raise _refuse("the request head is too large", ErrorCode.HEAD_TOO_LARGE)
        version = self._parser.get_http_version()
        self.head = make_head(
            method=self._parser.get_method(),
            target=self._target,
            fields=self._fields,
            version=version,
            keep_alive=self._parser.should_keep_alive(),
        )
        if self.head.content_length is not None and self.head.content_length > self._limits.max_body_bytes:
            raise _too_large(self._limits)

    def on_body(self, data: bytes) -> None:
        if self.complete:
            return
        self.body_bytes += len(data)
        if self.body_bytes > self._limits.max_body_bytes:
            raise _too_large(self._limits)
        self._body.append(data)

    def on_message_complete(self) -> None:
        if self.head is not None:
            self.complete = True


_SINGLETONS: Final = frozenset({b"host", b"content-length", b"transfer-encoding", b"content-type", b"expect"})
"""Headers that decide where a request goes, where it ends or what it is: two of them is an attack or a bug."""


def make_head(
    *, method: bytes, target: bytes, fields: list[Header], version: str, keep_alive: bool
) -> RequestHead:
    """Check what the parser let through and build the head.

    Raises:
        BadRequestError: missing or repeated Host, unknown framing, unknown target form, unknown version.
    """
    if version not in {"1.1", "1.0"}:
        raise _refuse(f"HTTP/{version} is not served here")
    known: dict[bytes, bytes] = {}
    for name, value in fields:
        if name not in known:
            known[name] = value
        elif name in _SINGLETONS:
            raise _refuse(f"more than one {name.decode()} header")
    if version == "1.1" and b"host" not in known:
        raise _refuse("the Host header is missing")
    length = known.get(b"content-length")
    encoding = known.get(b"transfer-encoding")
    if encoding is not None and (
        version == "1.0" or length is not None or encoding.lower().strip() != b"chunked"
    ):
        raise _refuse("the Transfer-Encoding is not plain chunked")
    if length is not None and not length.isdigit():
        raise _refuse("the Content-Length is not a number")
    path = strip_authority(target)
    expect = known.get(b"expect")
    if expect is not None and expect.lower() != b"100-continue":
        raise _refuse("the Expect header asks for something unknown")
    return RequestHead(
        method=method,
        path=path.partition(b"?")[0],
        target=path,
        headers=fields,
        index=known,
        http_1_1=version == "1.1",
        keep_alive=keep_alive and version == "1.1",
        content_length=int(length) if length is not None else None,
        chunked=encoding is not None,
        expects_continue=expect is not None and version == "1.1",
    )


def strip_authority(target: bytes) -> bytes:
    """Path and query of an origin-form or absolute-form target.

    Raises:
        BadRequestError: for any other form.
    """
    if target.startswith(b"/"):
        return target
    scheme, separator, rest = target.partition(b"://")
    if separator and scheme.lower() in {b"http", b"https"}:
        end = min((found for mark in b"/?#" if (found := rest.find(mark)) >= 0), default=len(rest))
        authority, path = rest[:end], rest[end:]
        if not authority or b"@" in authority:
            raise _refuse("the request target has no host, or one with a user")
        return path if path.startswith(b"/") else b"/" + path
    if target == b"*":
        return target
    raise _refuse("the request target is neither a path nor an address")


def _refuse(message: str, code: ErrorCode = ErrorCode.INVALID_VALUE) -> BadRequestError:
    return BadRequestError(ApiError(code, message))


def _too_large(limits: RelaySettings) -> BadRequestError:
    message = f"the request body is larger than {limits.max_body_bytes} bytes"
    return _refuse(message, ErrorCode.PAYLOAD_TOO_LARGE)


def _cause(error: BaseException) -> BadRequestError:
    """Our own refusal inside a parser's callback error; the parser hides it as context."""
    context = error.__context__
    return context if isinstance(context, BadRequestError) else _refuse("not a valid HTTP/1.1 request")
