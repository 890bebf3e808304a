"""Prefill and decode together: two decisions, one budget, downs before ups."""

from __future__ import annotations

from dataclasses import dataclass, replace

from millpond_common.contract.reasons import ScalingReason
from millpond_operator.scaling.records import Decision


@dataclass(frozen=True, slots=True)
class RolePlan:
    """One role's decision with what it costs."""

    decision: Decision
    current: int
    """Replicas that hold their GPUs now, draining ones included."""
    gpus_per_replica: int


def fit_budget(prefill: RolePlan, decode: RolePlan, budget_gpus: int) -> tuple[Decision, Decision]:
    """Lower the growth of either role until what is held now and what is added never exceed the budget.

    A replica that leaves frees its GPUs only once it is gone, so this loop plans against the larger of
    now and then; the freed ones are used by a later loop.
    """
    targets = [prefill.decision.replicas, decode.decision.replicas]
    plans = (prefill, decode)

    def held() -> int:
        return sum(max(t, p.current) * p.gpus_per_replica for t, p in zip(targets, plans, strict=True))

    bound = [False, False]
    while held() > budget_gpus:
        growing = [i for i in (0, 1) if targets[i] > plans[i].current]
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
