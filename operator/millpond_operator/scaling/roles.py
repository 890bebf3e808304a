"""Prefill and decode together: two decisions, one budget, downs before ups, and neither outgrows what the other can do."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from millpond_common.contract.reasons import ScalingReason
from millpond_operator.scaling.records import Decision

CAPS = frozenset({ScalingReason.BUDGET, ScalingReason.MAX_REPLICAS})
"""Limits that stay however long one waits, unlike a rate limit."""


@dataclass(frozen=True, slots=True)
class RolePlan:
    """One role's decision with what it costs."""

    decision: Decision
    current: int
    """Replicas that hold their devices now, draining ones included."""
    devices_per_replica: int


def fit_roles(prefill: RolePlan, decode: RolePlan, budget: int | None) -> tuple[Decision, Decision]:
    """One atomic decision about both roles.

    Args:
        prefill: what its own demand asks for.
        decode: what its own demand asks for.
        budget: devices for both together; None for no budget.
    """
    first, second = (
        fit_budget(prefill, decode, budget) if budget is not None else (prefill.decision, decode.decision)
    )
    return fit_pair(first, second, prefill.current), fit_pair(second, first, decode.current)


def fit_budget(prefill: RolePlan, decode: RolePlan, budget: int) -> tuple[Decision, Decision]:
    """Lower the growth of either role until what is held now and what is added never exceed the budget.

    A replica that leaves frees its devices only once it is gone, so this loop plans against the larger of
    now and then; the freed ones are used by a later loop.
    """
    targets = [prefill.decision.replicas, decode.decision.replicas]
    plans = (prefill, decode)

    def held() -> int:
        return sum(max(t, p.current) * p.devices_per_replica for t, p in zip(targets, plans, strict=True))

    bound = [False, False]
    while held() > budget:
        growing = [i for i in (0, 1) if targets[i] > plans[i].current and plans[i].devices_per_replica > 0]
        if not growing:
            break
        # The one that grows by more gives up first; on a tie decode keeps, since started requests wait on it.
        index = max(growing, key=lambda i: (targets[i] - plans[i].current, -i))
        targets[index] -= 1
        bound[index] = True
    first, second = (
        replace(p.decision, replicas=t, bounds=(*p.decision.bounds, ScalingReason.BUDGET))
        if b
        else p.decision
        for p, t, b in zip(plans, targets, bound, strict=True)
    )
    return first, second


def fit_pair(own: Decision, other: Decision, current: int) -> Decision:
    """Keep a role from growing past what the other can feed, or take, once that one has come to a limit.

    The other does its share of what was asked of it, so this one needs the same share of its own.
    """
    if not CAPS & set(other.bounds) or other.replicas >= other.recommendation:
        return own
    fed = math.ceil(own.recommendation * other.replicas / other.recommendation)
    limit = max(fed, min(current, own.replicas), 1)
    if own.replicas <= limit:
        return own
    return replace(own, replicas=limit, bounds=(*own.bounds, ScalingReason.PAIR_BOUND))
