"""Reading of a request body, once: only what routing and admission need; the bytes go on untouched.

Explicit null means absent for every optional field. What the engine alone has to judge is not judged here.
"""

from __future__ import annotations

from typing import Final

import msgspec

from millpond_common.contract.openai import ApiError, ErrorCode
from millpond_gateway.proxy.fields import ABSENT, NULL, decode_fields
from millpond_gateway.proxy.hidden import must_ask
from millpond_gateway.proxy.records import ParsedBody

_NULL: Final = b"null"
_MAX_CHOICES: Final = 1024
"""More than any engine makes of one prompt: what it will refuse must not count for millions of tokens here."""


def parse_body(body: bytes) -> ParsedBody | ApiError:
    """Read the fields, or say what is wrong with the body."""
    try:
        read = decode_fields(body)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at ")
        param = path.strip("`").removeprefix("$").removeprefix(".") or None
        return ApiError(ErrorCode.INVALID_VALUE, f"{param or 'the body'}: {message}", param)
    except RecursionError:
        return ApiError(ErrorCode.INVALID_VALUE, "the body is nested too deeply")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return ApiError(ErrorCode.INVALID_VALUE, f"the body is not valid JSON: {error}")
    limit = read.max_completion_tokens if read.max_completion_tokens is not None else read.max_tokens
    prompt = bytes(read.messages)
    if prompt == _NULL:
        prompt = bytes(read.prompt)
    template = b""
    if read.tools is not NULL or read.chat_template is not NULL or read.chat_template_kwargs is not NULL:
        template = _join(read.tools, read.chat_template, read.chat_template_kwargs)
    has_options = read.stream_options is not ABSENT
    return ParsedBody(
        model=read.model or "",
        stream=bool(read.stream),
        prompt=prompt,
        template=template,
        max_output_tokens=_bound(limit),
        num_choices=min(max(1, _bound(read.n) or 1, _bound(read.best_of) or 1), _MAX_CHOICES),
        cache_salt=read.cache_salt or "",
        service_tier=read.service_tier or "",
        num_bytes=len(body),
        hides_usage=bool(read.stream) and (not has_options or must_ask(read.stream_options)),
        has_stream_options=has_options,
        num_prompt_bytes=len(prompt) + len(template),
    )


def _bound(value: float | None) -> int | None:
    """A count from a number that the engine has yet to judge."""
    if value is None or not 0 <= value < 1 << 31:
        return None
    return int(value)


def _join(*raws: msgspec.Raw) -> bytes:
    parts = [bytes(raw) for raw in raws]
    if all(part == _NULL for part in parts):
        return b""
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)
