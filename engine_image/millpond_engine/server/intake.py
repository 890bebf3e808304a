"""Reading a request: trusted headers, content type, size and time bounds, JSON into a typed struct."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from aiohttp import web

from millpond_common.contract import headers
from millpond_common.contract.openai import ErrorCode
from millpond_engine.server.errors import RequestError, bad_value, make_error, unsupported
from millpond_engine.server.limits import ServerLimits

T = TypeVar("T")

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_NAME = re.compile(r"[A-Za-z0-9._:@/-]{1,128}")
_PATH = re.compile(r" - at `(?:key in )?\$\.?(.*?)`$")
_MISSING = re.compile(r"missing required field `([^`]+)`")
_GUIDED = re.compile(rb'"(guided_[a-z_]{1,40})"\s*:\s*(?!null)')


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, by the headers that only the gateway may set."""

    class_name: str
    tenant: str
    deadline_seconds: float | None
    """Monotonic time the first token is due."""


def get_request_id(request: web.BaseRequest) -> str:
    """The client's request id when it is short and printable, else a new one."""
    given = request.headers.get(headers.REQUEST_ID, "")
    return given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"


def read_caller(request: web.BaseRequest, *, default_class: str, now: float) -> Caller:
    """Class, tenant and deadline of the trusted headers.

    Raises:
        RequestError: malformed values, which only a misconfigured proxy sends.
    """
    class_name = request.headers.get(headers.CLASS) or default_class
    tenant = request.headers.get(headers.TENANT) or ""
    for name, value in ((headers.CLASS, class_name), (headers.TENANT, tenant)):
        if value and not _NAME.fullmatch(value):
            raise bad_value(name, "is not a name")
    milliseconds = request.headers.get(headers.DEADLINE)
    if milliseconds is None:
        return Caller(class_name, tenant, None)
    if not re.fullmatch(r"-?[0-9]{1,10}", milliseconds):
        raise bad_value(headers.DEADLINE, "must be whole milliseconds")
    return Caller(class_name, tenant, now + int(milliseconds) / 1000)


async def read_body(request: web.Request, limits: ServerLimits) -> bytes:
    """The whole body, within its bounds of size and time.

    Raises:
        RequestError: 400 other content type, 408 too slow, 413 too large, 415 compressed.
    """
    if request.content_type != "application/json":
        raise make_error(
            ErrorCode.INVALID_VALUE, "Content-Type must be application/json", param="Content-Type"
        )
    if request.charset not in {None, "utf-8", "UTF-8", "utf8"}:
        raise make_error(ErrorCode.INVALID_VALUE, "the body must be UTF-8", param="Content-Type")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        message = "compressed bodies are not accepted"
        raise make_error(ErrorCode.UNSUPPORTED_MEDIA_TYPE, message, param="Content-Encoding")
    length = request.content_length
    if length is not None and length > limits.max_body_bytes:
        raise _make_too_large(limits)
    try:
        async with asyncio.timeout(limits.body_seconds):
            return await request.read()
    except TimeoutError as error:
        message = f"the body did not arrive within {limits.body_seconds:g} s"
        raise make_error(ErrorCode.REQUEST_TIMEOUT, message) from error
    except web.HTTPRequestEntityTooLarge as error:
        raise _make_too_large(limits) from error
    except web.HTTPBadRequest as error:
        raise make_error(ErrorCode.INVALID_VALUE, "the body could not be read") from error


def _make_too_large(limits: ServerLimits) -> RequestError:
    return make_error(ErrorCode.PAYLOAD_TOO_LARGE, f"the body is larger than {limits.max_body_bytes} bytes")


def parse_body(body: bytes, kind: type[T]) -> T:
    """Decode JSON into `kind`.

    Raises:
        RequestError: broken JSON, wrong types, a `guided_*` field nobody knows.
    """
    unknown = _GUIDED.search(body)
    try:
        parsed = msgspec.json.decode(body, type=kind)
        if unknown is not None:
            _check_guided(body)
        return parsed
    except msgspec.ValidationError as error:
        raise _translate(error) from error
    except msgspec.DecodeError as error:
        raise make_error(ErrorCode.INVALID_VALUE, f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise make_error(ErrorCode.INVALID_VALUE, "the body is nested too deeply") from error
    except UnicodeDecodeError as error:
        raise make_error(ErrorCode.INVALID_VALUE, "the body is not valid UTF-8") from error


def _check_guided(body: bytes) -> None:
    """Refuse every top-level `guided_*` field, also those that the schema does not list."""
    for name, value in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items():
        if name.startswith("guided_") and bytes(value) != b"null":
            raise unsupported(name, "use structured_outputs, or response_format")


def _translate(error: msgspec.ValidationError) -> RequestError:
    text = str(error)
    missing = _MISSING.search(text)
    path = _PATH.search(text)
    param = path.group(1) if path else ""
    if missing:
        param = f"{param}.{missing.group(1)}" if param else missing.group(1)
    message = _PATH.sub("", text)
    return make_error(ErrorCode.INVALID_VALUE, f"{param or 'body'}: {message}", param=param or None)


def get_now() -> float:
    """Monotonic seconds, as the engine thread counts them."""
    return time.monotonic()
