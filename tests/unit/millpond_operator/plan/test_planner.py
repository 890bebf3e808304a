"""Whole decisions: what is written, what is reported, what is told."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.support.operator_builders import (
    NOW,
    SETTINGS,
    get_reasons,
    list_applied,
    make_child,
    make_container,
    make_gateway_view,
    make_living,
    make_pod,
    make_pool,
    make_revision,
    make_snapshot,
)

from millpond_common.contract import labels
from millpond_common.contract.reasons import ConditionReason, ConditionType
from millpond_operator.api.pool import InferencePool
from millpond_operator.api.status import Judgement, dump_status
from millpond_operator.plan.actions import Apply, Delete, MarkPod, SetFinalizer
from millpond_operator.plan.planner import plan
from millpond_operator.plan.scale import ReplicaDecision
from millpond_operator.plan.snapshot import GatewayView, ProbeAnswer, SiblingPool


def make_replicas(pool: InferencePool, num: int, **changes: Any) -> Any:
    revision = make_revision(pool)
    return tuple(make_pod(f"pod-{number}", revision=revision, **changes) for number in range(num))


def judge(pool: InferencePool, pods: Any, **changes: Any) -> tuple[str, str, str]:
    """The Ready condition of a pool all of whose children exist."""
    return get_reasons(plan(make_living(pool, pods=pods, **changes), SETTINGS, NOW))["Ready"]


def test_a_new_pool_gets_everything_in_a_safe_order() -> None:
    pool = make_pool(replicas=2, metadata={"finalizers": []})
    first = plan(make_snapshot(pool), SETTINGS, NOW)
    assert first.actions[0] == SetFinalizer(present=True)
    name = f"smol-{make_revision(pool)}"
    needed = {f"ConfigMap/{name}", f"Deployment/{name}", "ServiceAccount/smol-engine"}
    assert set(list_applied(first)) == needed, "pods wait for nothing else, so nothing stands in their way"
    assert (first.status, first.events) == (None, ()), "which the next round tells, at once"
    marked = make_pool(replicas=2)
    decided = plan(make_snapshot(marked), SETTINGS, NOW)
    assert decided.status is not None
    applied = list_applied(decided)
    assert set(applied) == needed | {
        "Service/smol-engines",
        "PodDisruptionBudget/smol-engine",
        "NetworkPolicy/smol-engine",
        *(f"{kind}/millpond-gateway" for kind in ("ServiceAccount", "RoleBinding", "Service", "Deployment")),
        "PodDisruptionBudget/millpond-gateway",
        "NetworkPolicy/millpond-gateway",
    }
    assert applied[f"Deployment/{name}"]["spec"]["replicas"] == 2
    stages = {
        f"{a.manifest.kind.name}/{a.manifest.name}": a.stage for a in decided.actions if isinstance(a, Apply)
    }
    assert stages[f"ConfigMap/{name}"] < stages[f"Deployment/{name}"]
    assert stages["ServiceAccount/smol-engine"] < stages[f"Deployment/{name}"]
    assert get_reasons(decided)["Ready"][:2] == ("False", "Creating")


def test_a_pool_that_answers_is_ready() -> None:
    pool = make_pool(replicas=2)
    status, reason, message = judge(pool, make_replicas(pool, 2))
    assert (status, reason) == ("True", "Answering")
    assert "2 replicas" in message


def test_a_settled_pool_needs_no_write_of_any_kind() -> None:
    pool = make_pool(replicas=1)
    snapshot = make_living(pool, pods=make_replicas(pool, 1))
    first = plan(snapshot, SETTINGS, NOW)
    assert first.actions == ()
    assert first.status is not None
    settled = dataclasses.replace(snapshot, pool=make_pool(replicas=1, status=dump_status(first.status)))
    again = plan(settled, SETTINGS, NOW + 1000)
    assert (again.actions, again.status, again.events) == ((), None, ())
    assert again.recheck_seconds == SETTINGS.settled_recheck_seconds


def test_a_fixed_pool_without_replicas_waits_for_nothing() -> None:
    pool = make_pool(replicas=0)
    first = plan(make_living(pool, pods=()), SETTINGS, NOW)
    assert get_reasons(first)["Ready"][:2] == ("False", "ScaledToZero")
    assert first.actions == ()
    assert first.recheck_seconds == SETTINGS.settled_recheck_seconds
    leaving = plan(make_living(pool, pods=make_replicas(pool, 1)), SETTINGS, NOW)
    assert leaving.recheck_seconds == SETTINGS.moving_recheck_seconds


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gateway": GatewayView(0, 0)}, ConditionReason.GATEWAY_NOT_READY),
        ({"gateway": GatewayView(1, 0, error="connection refused")}, ConditionReason.GATEWAY_NOT_READY),
        ({"gateway": GatewayView(2, 1)}, ConditionReason.GATEWAY_NOT_ROUTING),
        ({"probes": {}}, ConditionReason.PENDING),
        (
            {"probes": {"uid-pod-0": ProbeAnswer("uid-pod-0", False, "HTTP 500", NOW)}},
            ConditionReason.PROBE_FAILED,
        ),
        ({"missing_secrets": ("hf-token",)}, ConditionReason.SECRET_NOT_FOUND),
        ({"missing_claims": ("models",)}, ConditionReason.CLAIM_NOT_FOUND),
    ],
    ids=["no gateway", "silent gateway", "not routed", "not asked", "failed", "secret", "claim"],
)
def test_the_first_failing_check_names_the_reason(changes: dict[str, Any], reason: ConditionReason) -> None:
    pool = make_pool(replicas=1)
    status, found, message = judge(pool, make_replicas(pool, 1), **changes)
    assert (status, found) == ("False", reason)
    assert message


def test_op_023_ready_needs_every_gateway_to_route() -> None:
    pool = make_pool(replicas=1)
    pods = make_replicas(pool, 1)
    one = make_gateway_view(*pods)
    two = GatewayView(2, 2, (*one.reports, *make_gateway_view(*pods, unrouted=("pod-0",)).reports))
    assert judge(pool, pods, gateway=two)[1] == ConditionReason.GATEWAY_NOT_ROUTING


def test_op_024_ready_is_false_for_a_generation_that_is_not_rolled_out() -> None:
    before = make_pool(replicas=1)
    old = make_replicas(before, 1)
    snapshot = make_living(before, pods=old)
    after = make_pool(replicas=1, engine={"image": "engine:2"}, metadata={"generation": 4})
    decided = plan(dataclasses.replace(snapshot, pool=after), SETTINGS, NOW)
    assert decided.status is not None
    ready = next(c for c in decided.status.conditions if c.type == "Ready")
    assert (ready.status, ready.observed_generation) == ("False", 4)
    assert decided.status.observed_generation == 4
    assert decided.status.updated_replicas == 0


def test_updated_replicas_that_do_not_answer_yet_are_not_told_as_done() -> None:
    pool = make_pool(replicas=2)
    new = make_replicas(pool, 2, ready=False)
    old = tuple(make_pod(f"old-{number}", revision="old") for number in range(2))
    living = make_living(pool, pods=new)
    (workload,) = living.workloads
    earlier = dataclasses.replace(workload, name="old", uid="uid-old", revision="old")
    snapshot = make_snapshot(pool, pods=(*new, *old), children=living.children, workloads=(workload, earlier))
    status, reason, message = get_reasons(plan(snapshot, SETTINGS, NOW))["Ready"]
    assert (status, reason) == ("False", "RollingOut")
    told = f"2 of 2 replicas updated to revision {make_revision(pool)}, 0 of them answering; "
    assert message.startswith(told)


def test_a_scale_down_takes_no_replica_that_is_the_last_of_its_zone() -> None:
    pool = make_pool(replicas=2)
    places = {"alone": "node-a", "first": "node-b", "second": "node-c"}
    pods = tuple(make_pod(name, revision=make_revision(pool), node=node) for name, node in places.items())
    zones = {"node-a": "east", "node-b": "west", "node-c": "west"}
    for known, victim in (({}, "alone"), (zones, "first")):
        decided = plan(make_living(pool, pods=pods, zones=known), SETTINGS, NOW)
        assert [action.name for action in decided.actions if isinstance(action, MarkPod)] == [victim]


def test_op_040_a_draining_replica_is_shown_with_what_is_left() -> None:
    pool = make_pool(replicas=1)
    leaving = make_pod("pod-9", revision=make_revision(pool), deleting=True, deletion_deadline=NOW + 100)
    pods = (*make_replicas(pool, 1), leaving)
    decided = plan(
        make_living(pool, pods=pods, gateway=make_gateway_view(*pods, open_requests=7)), SETTINGS, NOW
    )
    assert decided.status is not None
    (draining,) = decided.status.draining
    assert (draining.replica, draining.num_requests) == ("pod-9", 7)
    assert draining.deadline == datetime.fromtimestamp(NOW + 70, UTC)


def test_op_061_a_scale_down_is_done_although_the_pool_is_not_ready() -> None:
    before = make_pool(replicas=3)
    pods = tuple(
        dataclasses.replace(pod, ready=number != 1) for number, pod in enumerate(make_replicas(before, 3))
    )
    living = make_living(before, pods=pods)
    decided = plan(
        dataclasses.replace(living, pool=make_pool(replicas=2, metadata={"generation": 4})), SETTINGS, NOW
    )
    (count,) = [
        body["spec"]["replicas"]
        for name, body in list_applied(decided).items()
        if name.startswith("Deployment/smol-")
    ]
    assert count == 2
    assert [mark.name for mark in decided.actions if isinstance(mark, MarkPod)] == ["pod-1"], (
        "the unready one"
    )


def test_op_043_ready_turns_false_when_a_replica_crash_loops_days_later() -> None:
    pool = make_pool(replicas=2)
    good, _ = make_replicas(pool, 2)
    failed = make_container(
        name="fetch-model", is_init=True, running=False, exit_code=1, waiting_reason="CrashLoopBackOff"
    )
    bad = make_pod("pod-1", revision=good.revision, ready=False, containers=(failed,))
    status, reason, message = judge(pool, (good, bad))
    assert (status, reason) == ("False", "ModelFetchFailed")
    assert "pod-1" in message


def test_op_048_a_fetch_under_way_is_shown_with_its_progress() -> None:
    pool = make_pool(replicas=1, model={"source": "hf://owner/repo"})
    fetching = make_container(name="fetch-model", is_init=True)
    pods = make_replicas(pool, 1, ready=False, containers=(fetching,))
    progress = {"uid-pod-0": "model.safetensors: 40 %, 16.00 GiB of 40.00 GiB, 200 MiB/s"}
    decided = plan(make_living(pool, pods=pods, fetch_progress=progress), SETTINGS, NOW)
    status, reason, message = get_reasons(decided)["ModelAvailable"]
    assert (status, reason) == ("False", "ModelFetching")
    assert "16.00 GiB of 40.00 GiB, 200 MiB/s" in message


def test_a_fetch_whose_attempts_fail_says_so_in_ready_before_it_gives_up() -> None:
    pool = make_pool(replicas=2, model={"source": "hf://owner/repo"})
    fetching = make_container(name="fetch-model", is_init=True)
    pods = make_replicas(pool, 2, ready=False, containers=(fetching,))
    assert judge(pool, pods)[2].endswith("pod-0, pod-1 (fetching the model)")
    line = "Unreachable: https://hub.example: ConnectError: refused; trying again"
    status, reason, message = judge(pool, pods, fetch_progress={"uid-pod-1": line})
    assert (status, reason) == ("False", "ReplicasNotReady")
    assert message.endswith(f"(fetching the model: {line})")


def test_op_044_without_a_replica_no_condition_says_available() -> None:
    pool = make_pool(replicas=2)
    reasons = get_reasons(plan(make_living(pool, pods=()), SETTINGS, NOW))
    assert reasons["Ready"][0] == "False"
    assert reasons["ModelAvailable"][0] != "True"


def test_op_017_a_count_set_by_hand_is_set_back_once_with_one_event() -> None:
    pool = make_pool(replicas=2)
    snapshot = make_living(pool, pods=make_replicas(pool, 2))
    (workload,) = snapshot.workloads
    edited = dataclasses.replace(workload, wanted=5, replicas_manager="kubectl-edit")
    children = tuple(
        dataclasses.replace(c, body={**c.body, "spec": {**c.body["spec"], "replicas": 5}}) if c.name == workload.name and c.kind.name == "Deployment" else c
        for c in snapshot.children
    )  # fmt: skip
    decided = plan(dataclasses.replace(snapshot, workloads=(edited,), children=children), SETTINGS, NOW)
    assert [body["spec"]["replicas"] for body in list_applied(decided).values()] == [2]
    (note,) = [event for event in decided.events if event.reason == ConditionReason.CONFLICT]
    assert "kubectl-edit" in note.message
    assert "kubectl scale mpool/smol" in note.message


def test_a_scale_down_names_its_victims_before_it_lowers_the_count() -> None:
    pool = make_pool(replicas=1)
    pods = make_replicas(pool, 3)
    endpoints = make_gateway_view(*pods).reports[0].endpoints
    valued = tuple(
        type(e)(**{f: getattr(e, f) for f in e.__struct_fields__} | {"unique_cached_tokens": value})
        for e, value in zip(endpoints, (5, 900, 10), strict=True)
    )
    report = dataclasses.replace(
        make_gateway_view(*pods), reports=(type(make_gateway_view().reports[0])("smol", valued),)
    )
    snapshot = make_living(make_pool(replicas=3), pods=pods)
    decided = plan(dataclasses.replace(snapshot, pool=pool, gateway=report), SETTINGS, NOW)
    marked = [action.name for action in decided.actions if isinstance(action, MarkPod)]
    assert sorted(marked) == ["pod-0", "pod-2"], "the replica with the most unique cache stays"
    first_apply = next(i for i, action in enumerate(decided.actions) if isinstance(action, Apply))
    assert all(isinstance(action, MarkPod) for action in decided.actions[:first_apply])
    assert get_reasons(decided)["Ready"][1] == ConditionReason.DRAINING


def test_a_mark_left_by_a_crash_is_taken_back() -> None:
    pool = make_pool(replicas=2)
    pods = (
        *make_replicas(pool, 1),
        make_pod("pod-9", revision=make_revision(pool), cordoned=True, deletion_cost=-1000),
    )
    decided = plan(make_living(pool, pods=pods), SETTINGS, NOW)
    (mark,) = decided.actions
    assert isinstance(mark, MarkPod)
    assert mark.labels == {labels.CORDONED: None}


def test_a_cordon_of_the_user_stays() -> None:
    pool = make_pool(replicas=1)
    pods = make_replicas(pool, 1, cordoned=True)
    decided = plan(make_living(pool, pods=pods), SETTINGS, NOW)
    assert decided.actions == ()
    assert get_reasons(decided)["Ready"][1] == ConditionReason.DRAINING


def test_adoption_is_refused_and_nothing_of_the_role_is_written() -> None:
    pool = make_pool(replicas=1)
    first = plan(make_snapshot(pool), SETTINGS, NOW)
    apply = next(a for a in first.actions if isinstance(a, Apply) and a.manifest.name == "smol-engines")
    foreign = make_child(apply, ownerReferences=[{"uid": "somebody", "controller": True}])
    decided = plan(make_snapshot(pool, children=(foreign,)), SETTINGS, NOW)
    assert "Service/smol-engines" not in list_applied(decided)
    status, reason, message = get_reasons(decided)["Ready"]
    assert (status, reason) == ("False", "ChildNotOurs")
    assert "Service smol-engines" in message


def test_a_workload_under_our_name_without_owner_is_not_adopted() -> None:
    pool = make_pool(replicas=1)
    first = plan(make_snapshot(pool), SETTINGS, NOW)
    apply = next(
        a
        for a in first.actions
        if isinstance(a, Apply) and a.manifest.kind.name == "Deployment" and "smol" in a.manifest.name
    )
    foreign = make_child(apply, ownerReferences=[])
    decided = plan(make_snapshot(pool, children=(foreign,)), SETTINGS, NOW)
    assert f"Deployment/{foreign.name}" not in list_applied(decided)
    assert get_reasons(decided)["Ready"][1] == ConditionReason.CHILD_NOT_OURS


def test_a_paused_pool_is_observed_and_left_alone() -> None:
    pool = make_pool(replicas=2, metadata={"annotations": {labels.PAUSED: "true"}})
    decided = plan(make_snapshot(pool), SETTINGS, NOW)
    assert decided.actions == ()
    reasons = get_reasons(decided)
    assert reasons["Ready"][:2] == ("False", "Paused")
    assert reasons["Progressing"][:2] == ("False", "Paused")


def test_a_split_pool_is_reported_as_not_served_and_nothing_is_started() -> None:
    resources = {"limits": {"cpu": "1"}}
    pool = make_pool(disaggregation={"prefill": {"resources": resources}, "decode": {"resources": resources}})
    decided = plan(make_snapshot(pool), SETTINGS, NOW)
    assert decided.actions == ()
    assert get_reasons(decided)["Ready"][:2] == ("False", "NotSupported")


def test_a_pool_with_adapters_is_reported_as_not_served_instead_of_starting_engines_that_refuse_them() -> (
    None
):
    model = {"source": "hf://owner/repo", "adapters": [{"name": "sql", "source": "hf://owner/sql"}]}
    decided = plan(make_snapshot(make_pool(replicas=1, model=model)), SETTINGS, NOW)
    assert decided.actions == ()
    status, reason, message = get_reasons(decided)["Ready"]
    assert (status, reason) == ("False", "NotSupported")
    assert "spec.model.adapters" in message
    assert "remove it" in message


def test_ignored_fields_are_admitted() -> None:
    pool = make_pool(replicas=1, engine={"kvCache": {"disk": {"size": "10Gi"}}})
    pods = make_replicas(pool, 1)
    degraded = get_reasons(plan(make_living(pool, pods=pods), SETTINGS, NOW))["Degraded"]
    assert degraded[:2] == ("True", "NotSupported")
    assert "spec.engine.kvCache.disk" in degraded[2]


def test_zero_replicas_are_not_ready_unless_a_request_can_wake_the_pool() -> None:
    assert judge(make_pool(replicas=0), ())[:2] == ("False", "ScaledToZero")
    scaled = make_pool(scaling={"minReplicas": 0, "maxReplicas": 2, "coldStartHoldSeconds": 60})
    assert judge(scaled, ())[:2] == ("True", "ScaledToZero")


def test_op_005_a_raised_minimum_starts_a_replica() -> None:
    scaled = make_pool(scaling={"minReplicas": 1, "maxReplicas": 2}, status={"desiredReplicas": 0})
    decided = plan(make_snapshot(scaled), SETTINGS, NOW)
    (count,) = [
        b["spec"]["replicas"] for n, b in list_applied(decided).items() if n.startswith("Deployment/smol")
    ]
    assert count == 1


def test_without_a_decision_the_count_is_held_and_the_condition_says_so() -> None:
    pool = make_pool(scaling={"minReplicas": 1, "maxReplicas": 9}, status={"desiredReplicas": 4})
    pods = make_replicas(pool, 4)
    decided = plan(make_living(pool, pods=pods), SETTINGS, NOW)
    assert decided.status is not None
    assert decided.status.desired_replicas == 4
    assert get_reasons(decided)["ScalingActive"][:2] == ("False", "NoData")


def test_a_decision_of_the_autoscaler_is_carried_out() -> None:
    pool = make_pool(scaling={"maxReplicas": 9}, status={"desiredReplicas": 1})
    active = Judgement(ConditionType.SCALING_ACTIVE, True, ConditionReason.SCALING, "because")
    decided = plan(make_snapshot(pool), SETTINGS, NOW, {"Both": ReplicaDecision(5, (active,))})
    (count,) = [
        b["spec"]["replicas"] for n, b in list_applied(decided).items() if n.startswith("Deployment/smol")
    ]
    assert count == 5
    assert get_reasons(decided)["ScalingActive"] == ("True", "Scaling", "because")


def test_the_gateway_goes_with_the_last_pool_that_wants_it() -> None:
    pool = make_pool(replicas=1)
    snapshot = make_living(pool, pods=make_replicas(pool, 1))
    without = make_pool(replicas=1, gateway={"enabled": False})
    decided = plan(dataclasses.replace(snapshot, pool=without, gateway=None, gateway_pools=()), SETTINGS, NOW)
    dropped = {(a.kind.name, a.name) for a in decided.actions if isinstance(a, Delete)}
    assert ("Deployment", "millpond-gateway") in dropped
    other = (SiblingPool("other", "uid-other"),)
    kept = plan(dataclasses.replace(snapshot, pool=without, gateway=None, gateway_pools=other), SETTINGS, NOW)
    assert not [a for a in kept.actions if isinstance(a, Delete)]


def test_op_113_a_cause_that_stays_is_told_once() -> None:
    pool = make_pool(replicas=1)
    pods = make_replicas(pool, 1, ready=False, containers=(make_container(exit_code=1, exit_message="boom"),))
    snapshot = make_living(pool, pods=pods)
    first = plan(snapshot, SETTINGS, NOW)
    assert [(event.warning, event.reason) for event in first.events] == [(True, "CrashLoop")]
    assert first.status is not None
    later = dataclasses.replace(snapshot, pool=make_pool(replicas=1, status=dump_status(first.status)))
    assert plan(later, SETTINGS, NOW + 60).events == ()


def test_records_beyond_the_history_go_and_living_ones_stay() -> None:
    pool = make_pool(replicas=1)
    snapshot = make_living(pool, pods=make_replicas(pool, 1))
    record = next(c for c in snapshot.children if c.kind.name == "ConfigMap")
    old = tuple(
        dataclasses.replace(
            record,
            name=f"smol-old{number}",
            uid=f"uid-old{number}",
            body={
                **record.body,
                "metadata": {**record.body["metadata"], "creationTimestamp": f"2026-01-0{number}T00:00:00Z"},
            },
        )
        for number in range(1, 6)
    )
    decided = plan(dataclasses.replace(snapshot, children=(*snapshot.children, *old)), SETTINGS, NOW)
    assert {a.name for a in decided.actions if isinstance(a, Delete)} == {"smol-old1", "smol-old2"}


@pytest.mark.parametrize(("ready_since", "ready"), [(NOW - 500, True), (NOW - 50, False)])
def test_a_restarted_operator_trusts_its_own_ready_for_replicas_that_were_there(
    ready_since: float, ready: bool
) -> None:
    stamp = datetime.fromtimestamp(NOW - 100, UTC).isoformat()
    condition = {
        "type": "Ready",
        "status": "True",
        "reason": "Answering",
        "message": "",
        "lastTransitionTime": stamp,
    }
    pool = make_pool(replicas=1, status={"conditions": [condition]})
    status, reason, _ = judge(pool, make_replicas(pool, 1, ready_since=ready_since), probes={})
    assert (status == "True") is ready
    assert reason == ("Answering" if ready else "Pending")


def test_a_failed_answer_beats_the_status_of_before() -> None:
    stamp = datetime.fromtimestamp(NOW - 100, UTC).isoformat()
    condition = {
        "type": "Ready",
        "status": "True",
        "reason": "Answering",
        "message": "",
        "lastTransitionTime": stamp,
    }
    pool = make_pool(replicas=1, status={"conditions": [condition]})
    failed = {"uid-pod-0": ProbeAnswer("uid-pod-0", False, "HTTP 500", NOW)}
    assert (
        judge(pool, make_replicas(pool, 1, ready_since=NOW - 500), probes=failed)[1]
        == ConditionReason.PROBE_FAILED
    )


@pytest.mark.parametrize(("overdue_seconds", "count"), [(-10.0, 0), (10.0, 0), (61.0, 1)])
def test_a_replica_on_a_lost_node_holds_no_rollout_for_ever(overdue_seconds: float, count: int) -> None:
    """It stays Terminating until somebody removes its node; the kubelet's deadline tells when nothing of it is left."""
    pool = make_pool(replicas=1, rollout={"strategy": "Replace"})
    left = make_pod(revision="old", deleting=True, ready=False, deletion_deadline=NOW - overdue_seconds)
    living = make_living(make_pool(replicas=0, rollout={"strategy": "Replace"}), pods=())
    (new,) = living.workloads
    old = dataclasses.replace(new, name="old", uid="uid-old", revision="old")
    seen = dataclasses.replace(living, pool=pool, pods=(left,), workloads=(old, new))
    decided = plan(seen, SETTINGS, NOW)
    name = f"Deployment/{new.name}"
    applied = list_applied(decided)
    assert (applied[name]["spec"]["replicas"] if name in applied else 0) == count
    assert decided.status is not None
    assert [entry.replica for entry in decided.status.draining] == [left.name], "it is still shown"


@pytest.mark.parametrize("kind", ["Deployment", "ConfigMap", "Service", "ServiceAccount"])
def test_what_an_earlier_pool_of_the_name_left_is_waited_for_and_accuses_nobody(kind: str) -> None:
    """Deleted and made again at once: the garbage collector is still at work on the objects of the first."""
    pool = make_pool(replicas=1)
    first = plan(make_snapshot(pool), SETTINGS, NOW)
    apply = next(a for a in first.actions if isinstance(a, Apply) and a.manifest.kind.name == kind)
    owner = {"kind": labels.KIND, "name": "smol", "uid": "an earlier uid", "controller": True}
    left = make_child(apply, ownerReferences=[owner])
    decided = plan(make_snapshot(pool, children=(left,)), SETTINGS, NOW)
    assert f"{kind}/{left.name}" not in list_applied(decided)
    status, reason, message = get_reasons(decided)["Ready"]
    assert (status, reason) == ("False", "Creating")
    assert f"{kind} {left.name}" in message
    assert not [note for note in decided.events if note.warning]
    assert decided.recheck_seconds == SETTINGS.moving_recheck_seconds
    other = make_child(apply, ownerReferences=[{**owner, "name": "another"}])
    accused = plan(make_snapshot(pool, children=(other,)), SETTINGS, NOW)
    assert get_reasons(accused)["Ready"][1] == "ChildNotOurs", "another pool's is another's"


def test_what_a_node_ended_is_told_while_its_successor_is_not_ready_and_counts_nowhere() -> None:
    pool = make_pool(replicas=1)
    revision = make_revision(pool)
    ended = make_pod(
        "before", revision=revision, ready=False, phase="Failed", failure="Evicted: low on memory"
    )
    waiting = make_living(pool, pods=(make_pod("now", revision=revision, ready=False),), ended=(ended,))
    decided = plan(waiting, SETTINGS, NOW)
    _, reason, message = get_reasons(decided)["Ready"]
    assert reason == "ReplicasNotReady"
    assert "its node ended before: Evicted: low on memory" in message
    assert decided.status is not None
    assert decided.status.replicas == 1
    serving = make_living(pool, pods=(make_pod("now", revision=revision),), ended=(ended,))
    assert get_reasons(plan(serving, SETTINGS, NOW))["Ready"][0] == "True"


def test_op_074_a_binding_to_the_role_of_another_release_is_replaced() -> None:
    """The API server refuses to change what a binding is to, so an apply would be refused for ever."""
    pool = make_pool(replicas=1)
    living = make_living(pool, pods=make_replicas(pool, 1))
    build = dataclasses.replace(SETTINGS.build, gateway_role_name="another-release-gateway")
    settings = dataclasses.replace(SETTINGS, build=build)
    decided = plan(living, settings, NOW)
    assert "RoleBinding/millpond-gateway" not in list_applied(decided)
    (gone,) = [a for a in decided.actions if isinstance(a, Delete)]
    assert (gone.kind.name, gone.name) == ("RoleBinding", "millpond-gateway")
    left = tuple(child for child in living.children if child.kind.name != "RoleBinding")
    applied = list_applied(plan(dataclasses.replace(living, children=left), settings, NOW))
    assert applied["RoleBinding/millpond-gateway"]["roleRef"]["name"] == "another-release-gateway"


def test_op_001_whoever_scales_the_gateway_keeps_its_count() -> None:
    """An HPA on the gateway's Deployment is never fought; a count edited by hand is put back."""
    pool = make_pool(replicas=1)
    living = make_living(pool, pods=make_replicas(pool, 1))
    gateway = next(c for c in living.children if (c.kind.name, c.name) == ("Deployment", "millpond-gateway"))
    body = {**gateway.body, "spec": {**gateway.body["spec"], "replicas": 7}}

    def apply_with(**changes: Any) -> dict[str, Any] | None:
        other = dataclasses.replace(gateway, body=body, **changes)
        children = tuple(other if child is gateway else child for child in living.children)
        decided = plan(dataclasses.replace(living, children=children), SETTINGS, NOW)
        return list_applied(decided).get("Deployment/millpond-gateway")

    edited = apply_with()
    assert edited is not None
    assert edited["spec"]["replicas"] == SETTINGS.build.gateway_replicas
    scaled = apply_with(scaled_by="kube-controller-manager")
    assert scaled is not None
    assert "replicas" not in scaled["spec"], "the operator gives the field up"
    digest = scaled["metadata"]["annotations"][labels.APPLIED_DIGEST]
    body = {**body, "metadata": {**body["metadata"], "annotations": scaled["metadata"]["annotations"]}}
    assert apply_with(scaled_by="kube-controller-manager", digest=digest) is None
