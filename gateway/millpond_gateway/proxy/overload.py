"""Is an engine's 503 an overload answer, given before it started anything? Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from millpond_common.contract.openai import ErrorCode
from millpond_gateway.proxy.records import AnswerHead

_BEFORE_START: Final = frozenset(
    {ErrorCode.OVERLOADED.value, ErrorCode.DRAINING.value, ErrorCode.ASLEEP.value}
)


class _Error(msgspec.Struct):
    code: str | int | None = None


class _Body(msgspec.Struct):
    error: _Error | None = None


def is_overload(head: AnswerHead, body: bytes) -> bool:
    """Whether the answer says that the request never began.

    Our engine names one of three codes. An engine that is not ours answers 503 with other bodies, all of them
    before it generates; a named other code is taken at its word.
    """
    if head.status != 503:
        return False
    try:
        read = msgspec.json.decode(body, type=_Body)
    except msgspec.MsgspecError:
        return True
    code = read.error.code if read.error is not None else None
    return not isinstance(code, str) or code in _BEFORE_START
