"""Token counts that an engine reported inside its answer."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from millpond_gateway.routing.records import Usage


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


_USAGE_OBJECT: Final = re.compile(rb'"usage"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')
"""The object and the objects directly inside it."""


_DECODER: Final = msgspec.json.Decoder(_Usage)


def find_usage(data: bytes) -> Usage | None:
    """The last usage object inside `data`; quotes inside JSON strings are escaped, so text cannot pose as one."""
    found = _USAGE_OBJECT.findall(data)
    if not found:
        return None
    try:
        read = _DECODER.decode(found[-1])
    except msgspec.MsgspecError:
        return None
    details = read.prompt_tokens_details
    return Usage(
        prompt_tokens=read.prompt_tokens,
        cached_tokens=details.cached_tokens if details is not None else None,
        output_tokens=read.completion_tokens or 0,
    )
