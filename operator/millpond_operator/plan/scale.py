"""How many replicas each role should have: fixed, or as the autoscaler decided, or held while nobody decides."""

from __future__ import annotations

from dataclasses import dataclass

from millpond_common.contract.reasons import ConditionReason, ConditionType
from millpond_operator.api.pool import RoleView
from millpond_operator.api.status import Judgement, ScalingStatus


@dataclass(frozen=True, slots=True)
class ReplicaDecision:
    """What the autoscaler wants for one role; made outside, passed into the plan."""

    replicas: int
    judgements: tuple[Judgement, ...]
    """ScalingActive and ScalingLimited."""
    status: ScalingStatus | None = None
    events: tuple[str, ...] = ()
    """Messages of changes worth an event."""


def decide_replicas(role: RoleView, current: int | None, decision: ReplicaDecision | None) -> ReplicaDecision:
    """The count of one role with the conditions that explain it.

    Args:
        role: its fixed count or its limits.
        current: replicas wanted until now; None for a role that never had any.
        decision: the autoscaler's, if one was made.
    """
    if role.scaling is None:
        assert role.replicas is not None, "a role without scaling has a count"
        message = "the count is fixed; change spec.replicas, or let an HPA or KEDA own it through the scale subresource"
        return ReplicaDecision(role.replicas, _judge(False, ConditionReason.FIXED_REPLICAS, message))
    if decision is not None:
        return decision
    low, high = role.scaling.min_replicas, role.scaling.max_replicas
    held = min(high, max(low, current if current is not None else low))
    message = f"no scaling decision has been made, so the count is held at {held}"
    return ReplicaDecision(held, _judge(False, ConditionReason.NO_DATA, message))


def _judge(active: bool, reason: ConditionReason, message: str) -> tuple[Judgement, ...]:
    limited = Judgement(
        ConditionType.SCALING_LIMITED, False, ConditionReason.WITHIN_LIMITS, "no limit binds the count"
    )
    return Judgement(ConditionType.SCALING_ACTIVE, active, reason, message), limited
