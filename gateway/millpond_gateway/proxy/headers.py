"""Which headers pass the gateway, in one table: request and response direction, own answers.

A header is dropped when it belongs to one connection (RFC 9110 section 7.6.1), when the gateway makes it
anew, or when only the gateway may say it. Everything else passes unchanged and in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from email.utils import formatdate
from http import HTTPStatus
from typing import Final

from millpond_common.contract import headers as contract
from millpond_common.contract.openai import ApiError
from millpond_gateway.proxy.records import Header, RequestHead

HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    }
)
PIN: Final = b"x-millpond-pin"
"""Own steering header of readiness probes: `<secret>/<replica>`; without the secret it means nothing."""
REASON: Final = contract.REASON.encode()
REQUEST_ID: Final = contract.REQUEST_ID.encode()
SESSION: Final = contract.SESSION.encode()
ENDPOINT: Final = contract.ENDPOINT.encode()
DECISION: Final = contract.DECISION.encode()
EPOCH: Final = contract.EPOCH.encode()
TRACE_PARENT: Final = b"traceparent"
TRACE_STATE: Final = b"tracestate"
_TRUSTED: Final = frozenset(name.encode() for name in contract.TRUSTED)
_CLASS: Final = contract.CLASS.encode()
_TENANT: Final = contract.TENANT.encode()
_DEADLINE: Final = contract.DEADLINE.encode()

DROPPED_FROM_REQUEST: Final = (
    HOP_BY_HOP
    | _TRUSTED
    | {PIN, REQUEST_ID}
    | {
        b"host",  # names the engine from here on
        b"content-length",  # counted from the body that is sent
        b"expect",  # answered by the gateway
        b"accept-encoding",  # a compressed stream could not be watched for its end
    }
)
DROPPED_FROM_RESPONSE: Final = (
    HOP_BY_HOP
    | _TRUSTED
    | {
        b"content-length",  # made anew with the framing
        b"server",  # the gateway's own
        REQUEST_ID,
    }
)
_SERVER: Final = b"server: millpond-gateway\r\n"
_REASONS: Final = {status.value: status.phrase.encode() for status in HTTPStatus}
_MAX_RETRY_SECONDS: Final = 3600
"""A bound on mistakes; who sets the time bounds it by what it knows: waits by what clients sit out, starts by none."""


def make_engine_head(
    head: RequestHead,
    *,
    host: bytes,
    prefix: bytes = b"",
    body_bytes: int,
    request_id: bytes,
    tenant: bytes = b"",
    traffic_class: bytes = b"",
    deadline_milliseconds: int | None = None,
    drop_authorization: bool = False,
    traceparent: bytes = b"",
) -> bytes:
    """Request line and headers for an engine."""
    parts = [
        b"%b %b%b HTTP/1.1\r\nhost: %b\r\ncontent-length: %d\r\n"
        % (head.method, prefix, head.target, host, body_bytes)
    ]
    parts.append(b"%b: %b\r\n" % (REQUEST_ID, request_id))
    if traffic_class:
        parts.append(b"%b: %b\r\n" % (_CLASS, traffic_class))
    if tenant:
        parts.append(b"%b: %b\r\n" % (_TENANT, tenant))
    if deadline_milliseconds is not None:
        parts.append(b"%b: %d\r\n" % (_DEADLINE, deadline_milliseconds))
    if traceparent:
        parts.append(b"%b: %b\r\n" % (TRACE_PARENT, traceparent))
    named = find_connection_options(head.headers) if b"connection" in head.index else ()
    if drop_authorization:
        named = (*named, b"authorization")
    if traceparent:
        named = (*named, TRACE_PARENT)
    for name, value in head.headers:
        if name in DROPPED_FROM_REQUEST or name in named:
            continue
        parts.append(b"%b: %b\r\n" % (name, value))
    parts.append(b"\r\n")
    return b"".join(parts)


def find_header(fields: list[Header], name: bytes) -> bytes | None:
    """First value of a header, by its name in lower case."""
    for key, value in fields:
        if key == name:
            return value
    return None


def find_connection_options(fields: Iterable[Header]) -> tuple[bytes, ...]:
    """Header names that a `Connection` header declares to belong to that connection only."""
    named: tuple[bytes, ...] = ()
    for name, value in fields:
        if name == b"connection":
            named += tuple(option.strip().lower() for option in value.split(b","))
    return named


def make_client_head(
    status: int,
    fields: Iterable[Header],
    *,
    request_id: bytes,
    content_length: int | None,
    chunked: bool,
    close: bool,
    debug: Iterable[Header] = (),
) -> bytes:
    """Status line and headers for a client from those of an engine."""
    parts = [b"HTTP/1.1 %d %b\r\n" % (status, _REASONS.get(status, b"")), _SERVER]
    for name, value in fields:
        if name not in DROPPED_FROM_RESPONSE:
            parts.append(b"%b: %b\r\n" % (name, value))
    parts.extend(b"%b: %b\r\n" % field for field in debug)
    parts.append(b"%b: %b\r\n" % (REQUEST_ID, request_id))
    if chunked:
        parts.append(b"transfer-encoding: chunked\r\n")
    elif content_length is not None:
        parts.append(b"content-length: %d\r\n" % content_length)
    parts.append(b"connection: close\r\n\r\n" if close else b"\r\n")
    return b"".join(parts)


def make_answer(
    status: int,
    body: bytes,
    *,
    request_id: bytes = b"",
    close: bool = False,
    content_type: bytes = b"application/json",
    extra: Iterable[Header] = (),
    without_body: bool = False,
) -> bytes:
    """One whole answer of the gateway itself; `without_body` answers a HEAD request."""
    parts = [
        b"HTTP/1.1 %d %b\r\n" % (status, _REASONS.get(status, b"")),
        _SERVER,
        b"date: %b\r\n" % formatdate(usegmt=True).encode(),
        b"content-type: %b\r\ncontent-length: %d\r\n" % (content_type, len(body)),
    ]
    parts.extend(b"%b: %b\r\n" % field for field in extra)
    if request_id:
        parts.append(b"%b: %b\r\n" % (REQUEST_ID, request_id))
    parts.append(b"connection: close\r\n\r\n" if close else b"\r\n")
    if not without_body:
        parts.append(body)
    return b"".join(parts)


def make_error_answer(
    error: ApiError,
    *,
    request_id: bytes = b"",
    close: bool = False,
    reason: str = "",
    allow: bytes = b"",
    without_body: bool = False,
) -> bytes:
    """An error of the gateway in OpenAI's shape, its enumerated reason and retry hint in headers."""
    extra: list[Header] = [(REASON, (reason or error.code.value).encode())]
    if error.retry_after_seconds is not None:
        extra.append((b"retry-after", b"%d" % max(1, min(_MAX_RETRY_SECONDS, error.retry_after_seconds))))
    if allow:
        extra.append((b"allow", allow))
    return make_answer(
        error.status,
        error.to_json(),
        request_id=request_id,
        close=close,
        extra=extra,
        without_body=without_body,
    )


def choose_request_id(offered: bytes | None, made: bytes) -> bytes:
    """The client's id when it is short and visible ASCII, else the one made here."""
    if offered and len(offered) <= 128 and all(33 <= byte <= 126 for byte in offered):
        return offered
    return made
