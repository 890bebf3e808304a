"""From what gateways and engines say to a count, over many loops."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from tests.support.operator_builders import (
    SETTINGS,
    get_reasons,
    list_applied,
    make_container,
    make_living,
    make_pod,
    make_pool,
    make_revision,
    make_snapshot,
)
from tests.support.scaled_pool import EPOCH, ScaledPool

from millpond_common.contract.gateway_report import PoolReport
from millpond_common.contract.reasons import ConditionReason, ConditionType, ScalingReason
from millpond_operator.api.pool import list_roles
from millpond_operator.api.status import PoolStatus, dump_status
from millpond_operator.observe.scalers import group_by_pool
from millpond_operator.plan.autoscale import Judged, ScalingView, judge_scaling, make_limits, make_supply
from millpond_operator.plan.planner import plan
from millpond_operator.plan.publish import REFRESH_SECONDS, make_decision, publish
from millpond_operator.plan.victims import choose_victims
from millpond_operator.scaling.memory import Memory, recall
from millpond_operator.scaling.starts import Start, StartSummary

SCALING = {"minReplicas": 1, "maxReplicas": 10, "scaleDownStabilizationSeconds": 300}
ZERO = SCALING | {"minReplicas": 0, "idleSeconds": 600, "coldStartHoldSeconds": 300}


PATIENCE = {"patience_seconds": 200.0, "startup_seconds": 1_800.0}


def make_scaled(count: int = 1, **changes: Any) -> ScaledPool:
    return ScaledPool(SCALING, count, **changes)


def test_as_005_data_is_there_two_loops_after_the_first_replica() -> None:
    pool = ScaledPool(SCALING, count=1, rate=400.0)
    judged = [pool.step() for _ in range(2)][-1]
    assert judged.gap is None
    assert judged.decision.demand_per_second == 400.0
    assert judged.decision.capacity_per_second == 1_000.0


def test_as_006_a_slow_start_is_not_answered_with_more_starts() -> None:
    pool = make_scaled(2, rate=3_000.0, start_seconds=8 * 15.0)
    assert set(pool.run(15 * 40)) == {4}


def test_as_009_one_silent_replica_neither_stops_nor_blocks() -> None:
    pool = make_scaled(5, rate=3_600.0)
    pool.silent = {"p1"}
    pool.state = {"in_use": 300}
    assert set(pool.run(600)) == {5}
    pool.rate = 100.0
    pool.state = {"in_use": 10}
    assert pool.run(600)[-1] == 1


def test_as_010_without_any_engine_the_count_is_held() -> None:
    pool = make_scaled(3, rate=100.0)
    pool.run(60)
    pool.silent = {"p1", "p2", "p3"}
    assert set(pool.run(1_200)) == {3}
    judged = pool.step()
    assert judged.gap is ScalingReason.NO_DATA
    assert "0 of 3 replicas told how full their KV cache is" in judged.gap_message


def test_as_011_as_012_an_outage_at_peak_holds_and_its_end_starts_the_window_anew() -> None:
    pool = make_scaled(7, rate=5_400.0)
    pool.run(600)
    pool.num_answering, pool.rate = 0, 0.0
    assert set(pool.run(600)) == {7}
    pool.num_answering = 2
    counts = pool.run(600)
    assert counts[: 290 // 15] == [7] * (290 // 15), "what was needed during the outage is unknown"
    assert counts[-1] == 1


def test_as_021_as_022_the_horizon_is_what_starts_took_nodes_included() -> None:
    pool = make_scaled(1, rate=5_000.0, start_seconds=1_200.0)
    pool.run(1_500)
    judged = pool.step()
    assert judged.start_seconds == 1_200.0
    assert judged.snapshot.horizon_seconds == 1_200.0
    assert make_decision(judged, pool.now).status.start_seconds == 1_200  # type: ignore[union-attr]


def test_as_023_a_new_operator_wakes_a_pool_at_zero() -> None:
    pool = ScaledPool(
        ZERO, count=0, rate=0.0, memory=recall(capacity=900, starts=(StartSummary("", 240.0, 1),))
    )
    pool.report = {"last_request_seconds_ago": None}
    assert set(pool.run(60)) == {0}
    pool.report = {"held_requests": 1, "held_tokens": 30, "last_request_seconds_ago": 0.0}
    judged = pool.step()
    assert judged.decision.replicas == 1
    assert judged.decision.reason is ScalingReason.HELD_DEMAND
    assert judged.start_seconds == 240.0


def test_a_request_that_was_not_held_wakes_a_pool_too_and_it_stays_up_to_be_used() -> None:
    pool = ScaledPool(ZERO, count=0, start_seconds=1_200.0)
    pool.report = {"last_request_seconds_ago": 3.0}
    assert pool.step().decision.replicas == 1
    since = pool.now
    while pool.now - since < 1_500.0:  # the client left and comes back when the start is over
        pool.report = {"last_request_seconds_ago": pool.now - since}
        assert pool.step().decision.replicas == 1
    while pool.now - since < 3_000.0:
        pool.report = {"last_request_seconds_ago": pool.now - since}
        pool.step()
    assert pool.count == 0


def test_op_051_the_ready_replicas_numbers_count() -> None:
    pool = make_scaled(4, rate=2_000.0)
    pool._pods[3] = replace(pool._pods[3], ready=False, ready_since=None)
    pool.stuck = {"p4"}
    pool.report = {"queued_tokens": 40_000}
    judged = pool.step()
    assert judged.decision.replicas > 4
    assert judged.decision.reason is ScalingReason.QUEUED_TOKENS


def test_op_054_a_pending_replica_leaves_first_when_the_load_is_gone() -> None:
    pool = make_scaled(3, rate=3_000.0)
    pool.stuck = {"p4"}
    pool.run(3_600)
    pending = [pod.name for pod in pool.pods if not pod.ready]
    assert pending
    pool.rate = 1_000.0
    assert pool.run(600)[-1] == 2
    assert all(pod.ready for pod in pool.pods)
    unready = make_pod("stuck", ready=False, ready_since=None)
    assert choose_victims([make_pod("a"), unready], 1, None) == [unready]


def test_op_055_the_real_count_is_what_is_scaled_from() -> None:
    """Somebody set the Deployment to 1 behind the decision of 4: the plan sees one pod and asks for four again."""
    pool = make_scaled(4, rate=3_100.0)
    pool._pods = pool._pods[:1]
    judged = pool.step()
    assert judged.snapshot.supply.ready == 1
    assert len(judged.snapshot.supply.pending_ages) == 3
    assert judged.decision.replicas == 4


def test_op_056_gateways_that_know_no_replica_say_so() -> None:
    pool = make_scaled(3, rate=0.0)
    view = pool.view()
    others = make_pod("stranger")
    blind = tuple(replace(s, report=replace_report(s.report, others.uid)) for s in view.gateways)
    judged = judge_scaling(
        pool.take_snapshot(), list_roles(pool.pool)[0], replace(view, gateways=blind), Memory(), pool.now
    )
    assert judged.gap is ScalingReason.PARTIAL_DATA
    assert "0 of 3 ready replicas" in judged.gap_message
    active = make_decision(judged, pool.now).judgements[0]
    assert (active.status, active.reason) == (False, ConditionReason.PARTIAL_DATA)


def replace_report(report: PoolReport, uid: str) -> PoolReport:
    endpoints = tuple(msgspec.structs.replace(e, pod_uid=uid) for e in report.endpoints)
    return msgspec.structs.replace(report, endpoints=endpoints)


def test_op_058_half_an_hour_idle_never_scales_up() -> None:
    pool = make_scaled(1, interval=10.0)
    assert set(pool.run(1_800)) == {1}


def test_op_059_a_pool_is_at_its_minimum_one_window_after_the_load() -> None:
    pool = make_scaled(1, rate=6_000.0)
    pool.run(600)
    assert pool.count == 8
    pool.rate = 0.0
    assert pool.run(300 + 2 * 15)[-1] == 1


def test_op_065_tenfold_load_for_a_moment_goes_up_fast_and_down_slowly() -> None:
    pool = make_scaled(1, rate=400.0)
    pool.run(600)
    pool.rate = 4_000.0
    assert pool.step().decision.replicas == 5
    pool.rate = 400.0
    counts = pool.run(600)
    steps = [(a, b) for a, b in pairwise(counts) if a != b]
    assert counts[: 270 // 15] == [5] * (270 // 15)
    assert steps == [(5, 1)]


def test_op_067_three_gateways_of_which_one_sees_the_traffic_keep_a_pool_up() -> None:
    pool = ScaledPool(ZERO, count=1, rate=5.0, num_gateways=3, num_answering=3)
    assert set(pool.run(1_800)) == {1}
    idle = ScaledPool(ZERO, count=1, rate=0.0, num_gateways=3, num_answering=3)
    idle.report = {"last_request_seconds_ago": 4_000.0}
    assert idle.step().decision.replicas == 0
    partly = ScaledPool(ZERO, count=1, rate=0.0, num_gateways=3, num_answering=2)
    partly.report = {"last_request_seconds_ago": 4_000.0}
    assert partly.step().decision.replicas == 1


def test_op_068_a_restarted_operator_starts_from_the_count_of_the_status() -> None:
    pool = make_scaled(7, rate=5_400.0)
    pool.run(600)
    pool.memory, pool.rate = Memory(), 0.0
    assert set(pool.run(285)) == {7}


def test_supply_and_draining_always_make_up_the_count() -> None:
    pods = tuple(make_pod(f"p{n}", ready=n < 3, ready_since=None) for n in range(5))
    for current in range(8):
        supply, memory = make_supply(pods, current, Memory(), EPOCH, **PATIENCE)
        assert supply.wanted == current
        assert supply.draining == max(0, 5 - current)
        assert (memory.short_since is not None) == (current > 5)
    kept, _ = make_supply(pods, 7, Memory(short_since=EPOCH - 500), EPOCH, **PATIENCE)
    assert sorted(kept.pending_ages)[-2:].count(500.0) == 2, "a quota does not make replicas young for ever"


def test_as_021_a_replica_that_loads_is_not_suspect_and_one_without_a_node_is() -> None:
    loads = make_pod(
        "loads", ready=False, ready_since=None, created_at=EPOCH - 1_200, containers=(make_container(),)
    )
    lost = make_pod("lost", ready=False, ready_since=None, created_at=EPOCH - 1_200, scheduled=False)
    supply, _ = make_supply((loads, lost), 2, Memory(), EPOCH, **PATIENCE)
    assert supply.count_suspect(100.0) == 1
    for_ever = replace(loads, created_at=EPOCH - 2_001)
    supply, _ = make_supply((for_ever, lost), 2, Memory(), EPOCH, **PATIENCE)
    assert supply.count_suspect(100.0) == 2


def test_a_pool_without_scaling_is_recommended_for_but_not_bounded() -> None:
    limits = make_limits(list_roles(make_pool(replicas=2))[0])
    assert (limits.min_replicas, limits.max_replicas, limits.kv_percent) == (0, 10_000, None)


def test_without_a_gateway_nobody_counts_demand() -> None:
    pool = make_pool(scaling=SCALING, gateway={"enabled": False})
    judged = judge_scaling(make_snapshot(pool), list_roles(pool)[0], ScalingView(), Memory(), EPOCH)
    assert "spec.gateway.enabled is false" in judged.gap_message


def test_as_004_the_condition_names_the_target_that_cannot_be_reached() -> None:
    pool = ScaledPool(SCALING | {"targets": {"ttftMilliseconds": 50}}, rate=10.0)
    pool.report = {"ttft_p90_milliseconds": {"interactive": 90}}
    for _ in range(4):
        judged = pool.step()
    assert judged.decision.replicas == 1
    limited = make_decision(judged, pool.now).judgements[1]
    assert (limited.type, limited.status, limited.reason) == (
        ConditionType.SCALING_LIMITED,
        True,
        ConditionReason.TARGET_UNREACHABLE,
    )
    assert "ttftMilliseconds is 50, and an idle replica needs 90" in limited.message


def test_op_047_numbers_alone_are_written_once_a_minute_and_changes_at_once() -> None:
    pool = make_scaled(1, rate=400.0)
    first = publish(pool.step(), None, pool.now)
    pool.rate = 410.0
    same = publish(pool.step(), first, pool.now)
    assert same.decision.status == first.decision.status
    late = publish(pool.step(), first, first.at + REFRESH_SECONDS)
    assert late.decision.status.demand_tokens_per_second == 410  # type: ignore[union-attr]
    pool.rate = 4_000.0
    moved = publish(pool.step(), late, pool.now)
    assert moved.decision.replicas == 5
    assert moved.decision.status.decision == 5  # type: ignore[union-attr]


def test_as_024_op_017_a_count_changed_behind_the_autoscaler_is_put_back_and_told() -> None:
    pool = make_pool(
        scaling=SCALING, status={"desiredReplicas": 2, "roles": [{"name": "Both"}], "conditions": []}
    )
    pods = tuple(make_pod(f"p{n}", revision=make_revision(pool)) for n in range(2))
    decided = make_decision(replace_count(2), EPOCH)
    living = make_living(pool, pods=pods)
    workloads = tuple(replace(w, wanted=6, replicas_manager="somebody") for w in living.workloads)
    children = tuple(
        replace(c, body={**c.body, "spec": {**c.body["spec"], "replicas": 6}})
        if c.kind.name == "Deployment" and "spec" in c.body and c.name == workloads[0].name
        else c
        for c in living.children
    )
    made = plan(replace(living, workloads=workloads, children=children), SETTINGS, EPOCH, {"Both": decided})
    (deployment,) = [
        body for name, body in list_applied(made).items() if name == f"Deployment/{workloads[0].name}"
    ]
    assert deployment["spec"]["replicas"] == 2
    assert [note.reason for note in made.events if note.warning] == [ConditionReason.CONFLICT]


def replace_count(count: int) -> Judged:
    return make_scaled(count, rate=800.0 * count * 0.99).step()


def test_a_change_of_the_count_is_one_event_with_the_numbers() -> None:
    pool = make_pool(scaling=SCALING, status={"desiredReplicas": 1, "roles": [{"name": "Both"}]})
    decided = make_decision(make_scaled(1, rate=2_900.0).step(), EPOCH)
    made = plan(
        make_living(pool, pods=(make_pod(revision=make_revision(pool)),)), SETTINGS, EPOCH, {"Both": decided}
    )
    (note,) = [event for event in made.events if event.action == "Scale"]
    assert note.reason == "PrefillDemand"
    assert note.message.startswith(
        "from 1 to 4 replicas (1 ready, 0 pending): PrefillDemand; demand 2900 of 1000"
    )
    assert made.status is not None
    assert made.status.scaling == decided.status
    assert get_reasons(made)["ScalingActive"][:2] == ("True", "Scaling")


def test_the_engines_values_choose_the_victim_where_all_ready_replicas_told_theirs() -> None:
    pods = [make_pod("a"), make_pod("b"), make_pod("c")]
    values = {"uid-a": 50.0, "uid-b": 3.0, "uid-c": 70.0}
    assert [p.name for p in choose_victims(pods, 1, None, values=values)] == ["b"]
    del values["uid-b"]
    assert [p.name for p in choose_victims(pods, 1, None, values=values)] == ["a"], "unknown is not worthless"


@pytest.mark.parametrize("manager", ["kube-controller-manager", "keda-operator"])
def test_a_count_set_through_the_scale_subresource_has_an_owner(manager: str) -> None:
    pool = make_pool(replicas=2)
    made = plan(make_snapshot(pool, count_manager=manager), SETTINGS, EPOCH)
    status, reason, message = get_reasons(made)["ScalingActive"]
    assert (status, reason) == ("False", "ExternalScaler")
    assert manager in message
    there = plan(make_snapshot(pool, scalers=("web",)), SETTINGS, EPOCH)
    assert "HorizontalPodAutoscaler web" in get_reasons(there)["ScalingActive"][2]
    by_hand = plan(make_snapshot(pool, count_manager="kubectl"), SETTINGS, EPOCH)
    assert get_reasons(by_hand)["ScalingActive"][1] == "FixedReplicas"


def test_op_050_an_hpa_beside_the_autoscaler_is_a_conflict_that_names_it() -> None:
    pool = make_pool(scaling=SCALING, status={"desiredReplicas": 1, "roles": [{"name": "Both"}]})
    decided = {"Both": make_decision(replace_count(1), EPOCH)}
    made = plan(make_snapshot(pool, scalers=("web",)), SETTINGS, EPOCH, decided)
    status, reason, message = get_reasons(made)["Degraded"]
    assert (status, reason) == ("True", "Conflict")
    assert "HorizontalPodAutoscaler web" in message
    fixed = make_pool(replicas=2)
    one = plan(make_snapshot(fixed, scalers=("web",)), SETTINGS, EPOCH)
    assert get_reasons(one)["Degraded"][1] != "Conflict"
    two = plan(make_snapshot(fixed, scalers=("keda-hpa-web", "web")), SETTINGS, EPOCH)
    assert "keda-hpa-web, web" in get_reasons(two)["Degraded"][2]


def test_only_scalers_of_our_kind_count() -> None:
    def scaler(name: str, version: str, kind: str, target: str) -> dict[str, Any]:
        reference = {"apiVersion": version, "kind": kind, "name": target}
        return {"metadata": {"name": name}, "spec": {"scaleTargetRef": reference}}

    found = group_by_pool(
        [
            scaler("b", "millpond.dev/v1alpha1", "InferencePool", "smol"),
            scaler("a", "millpond.dev/v1", "InferencePool", "smol"),
            scaler("c", "inference.networking.k8s.io/v1", "InferencePool", "smol"),
            scaler("d", "apps/v1", "Deployment", "smol"),
            {"metadata": {"name": "e"}},
        ]
    )
    assert found == {"smol": ("a", "b")}


def test_gateways_that_have_just_met_the_pool_are_not_called_stale() -> None:
    pool = make_scaled(2, rate=None)
    judged = pool.step()
    assert judged.gap is ScalingReason.NO_DATA
    assert "for long enough yet" in judged.gap_message
    assert judged.decision.replicas == 2


def test_as_018_what_the_victim_has_cached_must_fit_the_rest_before_it_leaves() -> None:
    pool = make_scaled(3, rate=500.0)
    pool.hit_rates = {"p1": 50.0, "p2": 400.0, "p3": 2_000.0}
    pool.run(900)
    assert pool.count == 2, "two can compute p1's 50 as well, one could not compute p2's 400 on top"
    judged = pool.step()
    assert judged.snapshot.victim_reuse_per_second == (400.0, 2_000.0), "p1 has left"
    assert judged.decision.bounds[-1] is ScalingReason.CACHED_VALUE
    assert make_decision(judged, pool.now).status.reason == "CachedValue"  # type: ignore[union-attr]
    pool.hit_rates = dict.fromkeys(pool.hit_rates, 0.0)
    assert pool.run(900)[-1] == 1, "the demand alone needs no second one"


def test_a_replica_whose_hits_are_not_counted_yet_is_not_worthless() -> None:
    pool = make_scaled(2, rate=500.0)
    pool.hit_rates = {"p1": 700.0, "p2": 700.0}
    pool.run(90)
    pool._pods[1] = replace(pool._pods[1], uid="another")
    assert pool.step().snapshot.victim_reuse_per_second == (700.0, 700.0)
    pool.hit_rates = {}
    assert pool.step().snapshot.victim_reuse_per_second == (), "nobody knows, so nobody is guarded"


def run_bursts(pool: ScaledPool, num: int) -> None:
    """Five minutes of calm and one interval of ten times the load, again and again."""
    for _ in range(num):
        pool.rate = 300.0
        pool.run(300)
        pool.rate = 3_800.0
        pool.step()
    pool.rate = 300.0


def test_bursts_that_no_start_can_follow_keep_a_warm_floor_where_it_is_asked_for() -> None:
    pool = ScaledPool(SCALING | {"warmFloor": "Bursts"}, start_seconds=240.0)
    run_bursts(pool, 5)
    pool.run(600)
    judged = pool.step()
    assert (pool.count, judged.snapshot.warm_floor) == (4, 4)
    assert make_decision(judged, pool.now).status.reason == "WarmFloor"  # type: ignore[union-attr]
    assert pool.run(3_900)[-1] == 1, "an hour without one ends it"
    unasked = make_scaled(start_seconds=240.0)
    run_bursts(unasked, 5)
    assert unasked.run(600)[-1] == 1
    assert unasked.memory.arrived == ()


def test_as_021_start_times_are_kept_by_kind_of_node_and_come_back_from_the_status() -> None:
    pool = make_scaled(1, rate=5_000.0, start_seconds=400.0, node_kinds={"node-1": "a3/H200"})
    pool.run(1_500)
    judged = pool.step()
    assert {start.node_kind for start in judged.memory.starts[1:]} == {"a3/H200"}
    status = make_decision(judged, pool.now).status
    assert status is not None
    assert [(s.node_kind, s.seconds) for s in status.start_times] == [("a3/H200", 400)]
    assert dump_status(PoolStatus(scaling=status))["scaling"]["startTimes"][0]["numStarts"] >= 5
    known = tuple(Start("a3/H200", 90.0) for _ in range(9))
    fresh = make_scaled(1, rate=100.0, node_kinds={"node-1": "a3/H200"}, other_starts=known)
    fresh._pods = [replace(pod, ready_since=None, ready=False) for pod in fresh._pods]
    assert fresh.step().snapshot.horizon_seconds == 90.0, "another pool of the model has measured it"
