"""Refusals as exceptions, so that a check deep in the preparation ends the request.

RequestError
  the one exception a handler may raise on purpose; carries the ApiError the client sees
"""

from __future__ import annotations

from millpond_common.contract.openai import ApiError, ErrorCode
from millpond_engine.records.request import Refusal, RefusalReason

RETRY_SECONDS = 1
"""Sent with refusals that end as soon as a queue moves."""

_RETRYABLE = {ErrorCode.OVERLOADED, ErrorCode.DRAINING, ErrorCode.ASLEEP, ErrorCode.TENANT_CONCURRENCY}


class RequestError(Exception):
    """A request that is refused or failed, as the client sees it."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


def make_error(
    code: ErrorCode, message: str, *, param: str | None = None, retry: int | None = None
) -> RequestError:
    """An error with the retry hint its kind has by default."""
    if retry is None and code in _RETRYABLE:
        retry = RETRY_SECONDS
    return RequestError(ApiError(code, message, param, retry))


def bad_value(param: str, message: str) -> RequestError:
    """The caller's value breaks a rule."""
    return make_error(ErrorCode.INVALID_VALUE, f"{param}: {message}", param=param)


def unsupported(param: str, message: str) -> RequestError:
    """The caller asks for something that would change the meaning and that this engine does not do."""
    return make_error(ErrorCode.UNSUPPORTED_FIELD, f"{param}: {message}", param=param)


_CODES = {
    RefusalReason.CONTEXT_LENGTH_EXCEEDED: ErrorCode.CONTEXT_LENGTH_EXCEEDED,
    RefusalReason.KV_CAPACITY_EXCEEDED: ErrorCode.KV_CAPACITY_EXCEEDED,
    RefusalReason.INVALID_VALUE: ErrorCode.INVALID_VALUE,
    RefusalReason.OVERLOADED: ErrorCode.OVERLOADED,
    RefusalReason.DRAINING: ErrorCode.DRAINING,
    RefusalReason.TENANT_CONCURRENCY: ErrorCode.TENANT_CONCURRENCY,
}


def translate_refusal(refusal: Refusal) -> RequestError:
    """The scheduler's refusal as the client sees it."""
    retry = (
        None if refusal.retry_after_seconds is None else min(120, max(1, round(refusal.retry_after_seconds)))
    )
    return make_error(_CODES[refusal.reason], refusal.message, retry=retry)
