"""Token counts that an engine reported inside its answer."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from millpond_gateway.proxy.fields import decode_usage
from millpond_gateway.routing.records import Usage

_NAME: Final = b'"usage"'
_OBJECT: Final = re.compile(rb'"usage"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')
"""The object and the objects directly inside it."""


def find_usage(data: bytes) -> Usage | None:
    """The last usage object inside `data`; quotes inside JSON strings are escaped, so text cannot pose as one."""
    at = data.rfind(_NAME)
    found = None
    while at >= 0 and found is None:
        found = _OBJECT.match(data, at)
        at = data.rfind(_NAME, 0, at)
    if found is None:
        return None
    try:
        read = decode_usage(found[1])
    except msgspec.MsgspecError:
        return None
    details = read.prompt_tokens_details
    return Usage(
        prompt_tokens=read.prompt_tokens,
        cached_tokens=details.cached_tokens if details is not None else None,
        output_tokens=read.completion_tokens or 0,
    )
