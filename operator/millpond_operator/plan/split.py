"""The autoscaler's decision about every role of a pool: one for a whole pool, two in one for a split one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from millpond_common.contract.reasons import ScalingReason
from millpond_operator.api.pool import InferencePool, RoleView, list_roles
from millpond_operator.api.quantity import parse_quantity
from millpond_operator.plan.autoscale import Judged, ScalingView, judge_scaling
from millpond_operator.plan.snapshot import PoolSnapshot
from millpond_operator.scaling.decide import explain
from millpond_operator.scaling.memory import Memory
from millpond_operator.scaling.records import Decision
from millpond_operator.scaling.roles import RolePlan, fit_roles

DEVICE_SUFFIX = "/gpu"
"""Extended resources that end so are devices: nvidia.com/gpu, amd.com/gpu."""


def judge_pool(
    snapshot: PoolSnapshot, view: ScalingView, memories: Mapping[str, Memory], now: float
) -> dict[str, Judged]:
    """Decide the count of every role. Pure: equal inputs give equal decisions."""
    roles = list_roles(snapshot.pool)
    judged: dict[str, Judged] = {
        role.role: judge_scaling(snapshot, role, view, memories.get(role.role, Memory()), now)
        for role in roles
    }
    if len(roles) == 1:
        return judged
    first, second = (_make_plan(snapshot, role, judged[role.role].decision) for role in roles)
    assert snapshot.pool.spec.disaggregation is not None
    fitted = fit_roles(first, second, snapshot.pool.spec.disaggregation.max_devices)
    for role, decision in zip(roles, fitted, strict=True):
        if decision != judged[role.role].decision:
            judged[role.role] = _refit(judged[role.role], decision)
    return judged


def count_devices(pool: InferencePool, role: RoleView) -> int:
    """Devices one replica holds: its extended resources, else its ranks."""
    asked = [int(parse_quantity(n)) for k, n in role.resources.limits.items() if k.endswith(DEVICE_SUFFIX)]
    return sum(asked) or pool.spec.engine.tensor_parallel_size


def _make_plan(snapshot: PoolSnapshot, role: RoleView, made: Decision) -> RolePlan:
    """A role with a fixed count takes its share of the budget and never gives it up."""
    held = sum(1 for pod in snapshot.pods if pod.role == role.role.lower())
    devices = count_devices(snapshot.pool, role)
    if role.replicas is None:
        return RolePlan(made, held, devices)
    fixed = Decision(role.replicas, role.replicas, ScalingReason.STEADY)
    return RolePlan(fixed, max(held, role.replicas), devices)


def _refit(judged: Judged, decision: Decision) -> Judged:
    return replace(judged, decision=replace(decision, message=explain(decision, judged.snapshot)))
