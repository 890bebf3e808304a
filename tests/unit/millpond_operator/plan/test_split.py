"""Split pools: each role follows its own demand, both decisions are one, and neither passes the budget."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.support.engine_states import make_engine_state
from tests.support.operator_builders import make_pod, make_pool
from tests.support.scaled_pool import EPOCH, make_report

from millpond_common.contract.reasons import ScalingReason
from millpond_operator.api.pool import list_roles
from millpond_operator.plan.autoscale import Judged, ScalingView
from millpond_operator.plan.snapshot import PoolSnapshot, Workload
from millpond_operator.plan.split import count_devices, judge_pool
from millpond_operator.scaling.aggregate import EngineSample, GatewaySample
from millpond_operator.scaling.memory import Memory
from millpond_operator.scaling.records import Decision
from millpond_operator.scaling.roles import RolePlan, fit_roles

SCALING = {"minReplicas": 1, "maxReplicas": 10, "targets": {"kvPercent": 80}}
GPU = {"limits": {"nvidia.com/gpu": 1, "cpu": "4", "memory": "8Gi"}}
DECODE_SPEED = 500.0


def judge(
    *,
    prefill: int = 2,
    decode: int = 2,
    prompts: float = 0.0,
    outputs: float = 0.0,
    in_use: int = 0,
    held: int = 0,
    scaling: dict[str, Any] | None = None,
    max_devices: int | None = None,
    roles: dict[str, Any] | None = None,
) -> dict[str, Judged]:
    """One decision about a pool with these replicas ready, at tokens per second of both kinds."""
    own = SCALING | (scaling or {})
    both = {name: {"scaling": own, "resources": GPU} for name in ("prefill", "decode")}
    budget = {"maxDevices": max_devices} if max_devices is not None else {}
    pool = make_pool(disaggregation=both | (roles or {}) | budget)
    counts = {"prefill": prefill, "decode": decode}
    pods = tuple(
        make_pod(f"{role}-{n}", role=role, created_at=EPOCH - 900, ready_since=EPOCH - 800)
        for role, count in counts.items()
        for n in range(count)
    )
    workloads = tuple(
        Workload(role, role, role, "r", count, "millpond-operator", 1, 1, 0.0, deleting=False)
        for role, count in counts.items()
    )
    report = make_report(*pods, rate=prompts, output_tokens_per_second_60=outputs, held_requests=held)
    engines = tuple(
        EngineSample(p.uid, EPOCH, make_engine_state(in_use=in_use if p.role == "decode" else 0))
        for p in pods
    )
    view = ScalingView((GatewaySample("g", EPOCH, report),), 1, engines)
    memories = {"Decode": Memory(decode_samples=(DECODE_SPEED,) * 4)}
    snapshot = PoolSnapshot(pool, EPOCH, workloads=workloads, pods=pods)
    return judge_pool(snapshot, view, memories, EPOCH)


def get_counts(judged: dict[str, Judged]) -> tuple[int, int]:
    return judged["Prefill"].decision.replicas, judged["Decode"].decision.replicas


def test_as_016_each_role_follows_its_own_demand() -> None:
    heavy_prompts = judge(prompts=4_000.0, outputs=100.0)
    assert get_counts(heavy_prompts) == (5, 2)
    assert heavy_prompts["Prefill"].decision.reason is ScalingReason.PREFILL_DEMAND
    heavy_outputs = judge(prompts=100.0, outputs=2_000.0)
    assert get_counts(heavy_outputs) == (2, 5)
    made = heavy_outputs["Decode"].decision
    assert made.reason is ScalingReason.DECODE_DEMAND
    assert (made.demand_per_second, made.capacity_per_second) == (2_000.0, DECODE_SPEED)
    assert "demand 2000 of 500 output tokens/s" in made.message
    residency = judge(in_use=1_000)
    assert get_counts(residency) == (2, 3)
    assert residency["Decode"].decision.reason is ScalingReason.KV_PRESSURE


def test_as_017_one_budget_for_both_and_its_reason_in_the_decision() -> None:
    judged = judge(prefill=3, decode=3, prompts=6_000.0, outputs=3_000.0, max_devices=8)
    assert sum(get_counts(judged)) == 8
    bounds = judged["Prefill"].decision.bounds + judged["Decode"].decision.bounds
    assert ScalingReason.BUDGET in bounds
    assert any("Budget" in found.decision.message for found in judged.values())
    free = judge(prefill=3, decode=3, prompts=6_000.0, outputs=3_000.0)
    assert get_counts(free) == (7, 7), "limited by the step alone"


def test_a_role_with_a_fixed_count_keeps_its_share() -> None:
    fixed = {"replicas": 2, "resources": GPU}
    for split in ({"decode": fixed}, {"prefill": fixed}):
        judged = judge(prompts=6_000.0, outputs=3_000.0, max_devices=5, roles=split)
        (grown,) = (name for name in ("Prefill", "Decode") if name.lower() not in split)
        assert judged[grown].decision.replicas == 3
        assert ScalingReason.BUDGET in judged[grown].decision.bounds


def test_op_071_a_held_request_wakes_both_roles() -> None:
    zero = {"minReplicas": 0, "coldStartHoldSeconds": 60}
    judged = judge(prefill=0, decode=0, held=1, scaling=zero)
    assert get_counts(judged) == (1, 1)
    assert {found.decision.reason for found in judged.values()} == {ScalingReason.HELD_DEMAND}


def test_a_role_does_not_grow_past_what_the_other_can_feed() -> None:
    judged = judge(prompts=6_000.0, outputs=3_000.0, scaling={"maxReplicas": 4})
    assert get_counts(judged) == (4, 4)
    first = RolePlan(Decision(4, 8, ScalingReason.PREFILL_DEMAND, (ScalingReason.MAX_REPLICAS,)), 2, 1)
    second = RolePlan(Decision(6, 6, ScalingReason.DECODE_DEMAND), 2, 1)
    prefill, decode = fit_roles(first, second, None)
    assert (prefill.replicas, decode.replicas) == (4, 3), "half of the prompts make half of the outputs"
    assert decode.bounds == (ScalingReason.PAIR_BOUND,)


def test_devices_are_extended_resources_else_ranks() -> None:
    pool = make_pool(resources={"limits": {"nvidia.com/gpu": 4, "cpu": "4", "memory": "8Gi"}})
    assert count_devices(pool, list_roles(pool)[0]) == 4
    pool = make_pool(engine={"tensorParallelSize": 2})
    assert count_devices(pool, list_roles(pool)[0]) == 2


COUNTS = st.integers(0, 12)


@given(COUNTS, COUNTS, COUNTS, COUNTS, st.integers(1, 4), st.integers(1, 4), st.integers(1, 60))
def test_no_instant_passes_the_budget_and_no_role_falls_for_it(
    wanted: int, other: int, held: int, other_held: int, devices: int, other_devices: int, budget: int
) -> None:
    plans = (
        RolePlan(Decision(wanted, wanted, ScalingReason.PREFILL_DEMAND), held, devices),
        RolePlan(Decision(other, other, ScalingReason.DECODE_DEMAND), other_held, other_devices),
    )
    made = fit_roles(*plans, budget)
    held_now = held * devices + other_held * other_devices
    then = sum(max(d.replicas, p.current) * p.devices_per_replica for d, p in zip(made, plans, strict=True))
    assert then <= max(budget, held_now)
    for decision, before in zip(made, plans, strict=True):
        assert min(before.current, before.decision.replicas) <= decision.replicas <= before.decision.replicas
