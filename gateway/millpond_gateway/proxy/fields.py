"""What is decoded of request bodies and answers, by field; names and defaults are OpenAI's."""

from __future__ import annotations

from typing import Final

import msgspec

NULL: Final = msgspec.Raw(b"null")
ABSENT: Final = msgspec.Raw(b"")


class BodyFields(msgspec.Struct, gc=False):
    model: str | None = None
    stream: bool | None = None
    stream_options: msgspec.Raw = ABSENT
    messages: msgspec.Raw = NULL
    prompt: msgspec.Raw = NULL
    tools: msgspec.Raw = NULL
    chat_template: msgspec.Raw = NULL
    chat_template_kwargs: msgspec.Raw = NULL
    max_tokens: float | int | None = None
    max_completion_tokens: float | int | None = None
    n: float | int | None = None
    best_of: float | int | None = None
    cache_salt: str | None = None
    service_tier: str | None = None


class UsageDetails(msgspec.Struct):
    cached_tokens: int | None = None


class UsageFields(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int | None = None
    prompt_tokens_details: UsageDetails | None = None


_BODY: Final = msgspec.json.Decoder(BodyFields)
_USAGE: Final = msgspec.json.Decoder(UsageFields)


def decode_fields(body: bytes) -> BodyFields:
    """The fields of a request.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: it is no such JSON.
    """
    return _BODY.decode(body)


def decode_usage(data: bytes) -> UsageFields:
    """One usage object.

    Raises:
        msgspec.MsgspecError: it is none.
    """
    return _USAGE.decode(data)
