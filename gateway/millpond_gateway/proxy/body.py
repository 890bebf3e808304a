"""Reading of a request body, once: only what routing and admission need; the bytes go on untouched.

Explicit null means absent for every optional field. What the engine alone has to judge is not judged here.
"""

from __future__ import annotations

from typing import Final

import msgspec

from millpond_common.contract.openai import ApiError, ErrorCode
from millpond_gateway.proxy.hidden import must_ask

_OPTIONAL_RAW: Final = msgspec.Raw(b"null")
_ABSENT: Final = msgspec.Raw(b"")


class _Body(msgspec.Struct, gc=False):
    model: str | None = None
    stream: bool | None = None
    stream_options: msgspec.Raw = _ABSENT
    messages: msgspec.Raw = _OPTIONAL_RAW
    prompt: msgspec.Raw = _OPTIONAL_RAW
    tools: msgspec.Raw = _OPTIONAL_RAW
    chat_template: msgspec.Raw = _OPTIONAL_RAW
    chat_template_kwargs: msgspec.Raw = _OPTIONAL_RAW
    max_tokens: float | int | None = None
    max_completion_tokens: float | int | None = None
    n: float | int | None = None
    cache_salt: str | None = None
    service_tier: str | None = None


class ParsedBody(msgspec.Struct, frozen=True, gc=False):
    """What the gateway knows about one request's body."""

    model: str
    """Empty when the body names none."""
    stream: bool
    prompt: bytes
    """Raw JSON of `messages` or `prompt`: the text behind the fallback key."""
    template: bytes
    """Raw JSON of what else shapes the prompt: tools, template and its arguments."""
    max_output_tokens: int | None
    num_choices: int
    cache_salt: str
    service_tier: str
    num_bytes: int
    hides_usage: bool = False
    """A stream whose usage the client did not ask for."""
    has_stream_options: bool = False
    """The field is there, be it null."""
    num_prompt_bytes: int = 0
    """Of prompt and template, known after they are forgotten."""

    def forget_prompt(self) -> ParsedBody:
        """The same without prompt and template: an answer may take an hour, and nobody reads them any more."""
        return msgspec.structs.replace(self, prompt=b"", template=b"")


_DECODER: Final = msgspec.json.Decoder(_Body)
_NULL: Final = b"null"


def parse_body(body: bytes) -> ParsedBody | ApiError:
    """Read the fields, or say what is wrong with the body."""
    try:
        read = _DECODER.decode(body)
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
    template = _join(read.tools, read.chat_template, read.chat_template_kwargs)
    has_options = read.stream_options is not _ABSENT
    return ParsedBody(
        model=read.model or "",
        stream=bool(read.stream),
        prompt=prompt,
        template=template,
        max_output_tokens=_bound(limit),
        num_choices=max(1, _bound(read.n) or 1),
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
