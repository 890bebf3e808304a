"""How many replicas each role should have: fixed, or as the autoscaler decided, or held while nobody decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from millpond_common.contract.reasons import ConditionReason, ConditionType
from millpond_operator.api.pool import RoleView
from millpond_operator.api.status import Judgement, ScalingStatus
from millpond_operator.plan.snapshot import PoolSnapshot

PEOPLE = "kubectl"
"""Field managers that begin so are persons: a count set by hand is a fixed one."""


@dataclass(frozen=True, slots=True)
class ReplicaDecision:
    """What the autoscaler wants for one role; made outside, passed into the plan."""

    replicas: int
    judgements: tuple[Judgement, ...]
    """ScalingActive and ScalingLimited."""
    status: ScalingStatus | None = None
    message: str = ""
    """Why this count, for the event of a change."""
    cached_values: Mapping[str, float] = field(default_factory=dict)
    """By replica's UID: cached prompt tokens that would be computed again without it, weighted by recent reuse."""


def find_current(snapshot: PoolSnapshot, role: str) -> int | None:
    """The count decided last: what the status says, else what the Deployments want together. `role` in lower case."""
    status = snapshot.pool.status
    if len(status.roles) <= 1 and status.desired_replicas is not None and snapshot.workloads:
        return status.desired_replicas
    wanted = [workload.wanted for workload in snapshot.workloads if workload.role == role]
    return sum(wanted) if wanted else None


def find_owner(snapshot: PoolSnapshot) -> str:
    """Who sets the count through the scale subresource: the HPAs that are there, else a program that did last."""
    if snapshot.scalers:
        return "HorizontalPodAutoscaler " + ", ".join(snapshot.scalers)
    return "" if snapshot.count_manager.startswith(PEOPLE) else snapshot.count_manager


def decide_replicas(
    role: RoleView, current: int | None, decision: ReplicaDecision | None, owner: str = ""
) -> ReplicaDecision:
    """The count of one role with the conditions that explain it.

    Args:
        role: its fixed count or its limits.
        current: replicas wanted until now; None for a role that never had any.
        decision: the autoscaler's, if one was made.
        owner: who sets a fixed count through the scale subresource; empty when nobody does.
    """
    if role.scaling is None:
        assert role.replicas is not None, "a role without scaling has a count"
        if owner:
            text = f"spec.replicas is set through the scale subresource by {owner}; Millpond never writes it"
            return ReplicaDecision(role.replicas, _judge(False, ConditionReason.EXTERNAL_SCALER, text))
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
