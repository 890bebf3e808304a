"""Admit, hold or shed: one table over what the pool looks like now."""

from __future__ import annotations

import math
from typing import Final

from millpond_gateway.flow.records import Action, ClassPolicy, FlowReason, FlowSettings, PoolView, Verdict

MAX_RETRY_SECONDS: Final = 120
"""The OpenAI SDK does not wait longer."""
EMPTY_RETRY_SECONDS: Final = 5
"""Where nothing measured says when there will be a replica."""
MAX_START_RETRY_SECONDS: Final = 3600
"""A start is not shortened for a client's sake: a promise that comes too early is none."""
_MIN_WAIT_SHARE: Final = 0.25
"""A prompt so long that it misses the target on an idle replica may still queue this share of the target."""


def decide_admission(view: PoolView, policy: ClassPolicy, settings: FlowSettings) -> Verdict:
    """Answer to a request that passed the gate and its tenant's budget.

    | pool | class | answer |
    |---|---|---|
    | nothing routable, nothing starting | any | shed, 503 |
    | nothing routable, starting | any | hold; where the pool holds nothing, shed, 503 |
    | saturated, or others are held | sheddable | shed, 429 |
    | saturated, or others are held | other | hold |
    | otherwise | any | admit |
    """
    if view.num_routable == 0:
        if view.starting and settings.cold_start_hold_seconds > 0:
            return Verdict(Action.HOLD, FlowReason.COLD_START)
        return _refuse_empty(view)
    reason = _find_hold_reason(view, policy, settings)
    if reason is None:
        return Verdict(Action.ADMIT, FlowReason.CAPACITY)
    if policy.sheddable:
        return Verdict(Action.SHED, FlowReason.SHEDDABLE, compute_retry_after(view, policy, settings))
    return Verdict(Action.HOLD, reason)


def may_start(view: PoolView, policy: ClassPolicy, settings: FlowSettings) -> bool:
    """Whether a held request whose turn it is may be bound to a replica now."""
    return view.num_routable > 0 and not is_saturated(view, policy, settings)


def is_saturated(view: PoolView, policy: ClassPolicy, settings: FlowSettings) -> bool:
    """Whether every replica's queue makes the class miss its target."""
    if view.queue_seconds is None:
        return True
    return view.queue_seconds > compute_allowed_wait(view, policy, settings)


def compute_allowed_wait(view: PoolView, policy: ClassPolicy, settings: FlowSettings) -> float:
    """Seconds of queue that still let the request meet its class's target."""
    target = policy.ttft_seconds if policy.ttft_seconds is not None else settings.default_ttft_seconds
    return max(target - view.own_seconds, _MIN_WAIT_SHARE * target)


def compute_hold_seconds(reason: FlowReason, settings: FlowSettings) -> float:
    """How long a request may be held for this reason."""
    if reason is FlowReason.COLD_START:
        return settings.cold_start_hold_seconds
    return settings.max_hold_seconds


def decide_expired(view: PoolView, policy: ClassPolicy, settings: FlowSettings) -> Verdict:
    """Answer to a request whose hold ended: 429 while replicas serve, 503 while none does, never 504."""
    if view.num_routable == 0:
        return _refuse_empty(view)
    return Verdict(Action.SHED, FlowReason.HOLD_EXPIRED, compute_retry_after(view, policy, settings))


def compute_retry_after(view: PoolView, policy: ClassPolicy, settings: FlowSettings) -> int | None:
    """Seconds until the pool, at its measured speed, has worked off what keeps this request out.

    That is what is held in the gateway plus the part of the shortest queue that exceeds the allowed wait. None
    when nothing measured says when.
    """
    if view.tokens_per_second <= 0 or view.queue_seconds is None:
        return None
    excess = max(view.queue_seconds - compute_allowed_wait(view, policy, settings), 0.0)
    seconds = excess + view.held_tokens / view.tokens_per_second
    return min(max(math.ceil(seconds), 1), MAX_RETRY_SECONDS)


def _refuse_empty(view: PoolView) -> Verdict:
    """503, with the rest of the measured start where one is under way; an overdue start is asked for again soon."""
    if not view.starting:
        return Verdict(Action.SHED, FlowReason.NO_REPLICA, EMPTY_RETRY_SECONDS)
    left = view.start_seconds_left or 0.0
    hint = min(max(math.ceil(left), EMPTY_RETRY_SECONDS), MAX_START_RETRY_SECONDS)
    return Verdict(Action.SHED, FlowReason.COLD_START, hint)


def _find_hold_reason(view: PoolView, policy: ClassPolicy, settings: FlowSettings) -> FlowReason | None:
    if view.gated:
        return FlowReason.CLASS_GATED
    if is_saturated(view, policy, settings):
        return FlowReason.SATURATED
    return FlowReason.QUEUED_BEHIND if view.num_held else None
