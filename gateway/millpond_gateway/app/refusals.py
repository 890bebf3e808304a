"""Decisions as clients see them: refusals in OpenAI's shape, and the score breakdown for the debug headers."""

from __future__ import annotations

from typing import Final

from millpond_common.contract.openai import ApiError, ErrorCode
from millpond_gateway.flow.records import FlowReason, Verdict
from millpond_gateway.proxy import headers
from millpond_gateway.proxy.records import Header
from millpond_gateway.routing.records import Choice, ChoiceReason
from millpond_gateway.world.records import PoolView as PoolSpec


def make_refusal(spec: PoolSpec, verdict: Verdict) -> ApiError:
    """A shed request's answer: status, enumerated reason, and when to come again."""
    code = (
        ErrorCode.SATURATED
        if verdict.code is ErrorCode.OVERLOADED and verdict.status == 429
        else verdict.code
    )
    return ApiError(
        code,
        f"{spec.model}: {_EXPLANATIONS.get(verdict.reason, 'too busy')} ({verdict.reason.value})",
        retry_after_seconds=verdict.retry_after_seconds,
    )


_EXPLANATIONS: Final = {
    FlowReason.TENANT_CONCURRENCY: "the tenant has as many requests open as it may",
    FlowReason.TENANT_TOKENS: "the tenant's tokens of this minute are used up",
    FlowReason.TOKENS_NEVER_FIT: "prompt and longest output together are more than the tenant may use in a whole minute; lower max_tokens",
    FlowReason.COLD_START: "the pool is starting and was not ready in time",
    FlowReason.HOLD_EXPIRED: "no replica became free in time",
    FlowReason.SHEDDABLE: "every replica is busy and this class is not held",
    FlowReason.QUEUE_FULL: "too many requests are waiting",
    FlowReason.HELD_BYTES: "the waiting requests are too large together",
}


def refuse_choice(spec: PoolSpec, choice: Choice, tried: frozenset[str]) -> ApiError:
    """Why no replica took the request: 502 after failed attempts, 503 when there was none to ask."""
    if tried:
        message = f"every replica of {spec.model} that could be asked failed or was overloaded"
        return ApiError(ErrorCode.REPLICA_FAILED, message, retry_after_seconds=1)
    if choice.reason is ChoiceReason.NO_ENDPOINT:
        return ApiError(ErrorCode.NO_REPLICA, f"{spec.model} has no replica now", retry_after_seconds=5)
    counts: dict[str, int] = {}
    for drop in choice.drops:
        counts[drop.reason.value] = counts.get(drop.reason.value, 0) + 1
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()))
    message = f"no replica of {spec.model} can take the request: {reasons}"
    return ApiError(ErrorCode.NO_REPLICA, message, retry_after_seconds=5)


def describe_choice(choice: Choice) -> str:
    """The policy, the reason, and each candidate's cost term by term."""
    terms = [
        f"{score.uid}={score.total_seconds:.6f}(queue={score.queue_seconds:.6f},own={score.own_seconds:.6f},"
        f"decode={score.decode_seconds:.6f},affinity={score.affinity_seconds:.6f},cached={score.cached_tokens})"
        for score in choice.scores[:16]
    ]
    return f"{choice.policy.value}/{choice.reason.value}; " + "; ".join(terms)


def make_debug(choice: Choice, text: str) -> tuple[Header, ...]:
    """Headers that show which replica was chosen and from which numbers."""
    assert choice.endpoint is not None
    return (
        (headers.ENDPOINT, choice.endpoint.pod.encode("latin-1", "replace")),
        (headers.DECISION, text.encode("latin-1", "replace")),
    )
