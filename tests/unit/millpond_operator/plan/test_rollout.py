"""Counts of revisions, case by case; the property tests cover what happens in between."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.support.operator_builders import NOW, make_pod

from millpond_common.contract.reasons import ConditionReason
from millpond_operator.plan.rollout import RoleInput, plan_counts
from millpond_operator.plan.snapshot import Pod, Workload


def make_workload(revision: str, wanted: int, *, created_at: float = 0.0) -> Workload:
    return Workload(
        name=f"w-{revision}", uid=f"u-{revision}", role="both", revision=revision, wanted=wanted,
        replicas_manager="", generation=1, observed_generation=1, created_at=created_at, deleting=False,
    )  # fmt: skip


def make_pods(revision: str, num: int, **changes: Any) -> tuple[Pod, ...]:
    prefix = changes.pop("prefix", revision)
    return tuple(make_pod(f"{prefix}-{number}", revision=revision, **changes) for number in range(num))


def make_input(
    *, desired: int, workloads: list[Workload], pods: tuple[Pod, ...], **changes: Any
) -> RoleInput:
    values: dict[str, Any] = {
        "revision": "new",
        "desired": desired,
        "workloads": tuple(workloads),
        "pods": pods,
        "answering": frozenset(pod.uid for pod in pods if pod.serving),
        "strategy": "Auto",
        "max_unavailable": 0,
        "surge_percent": 25,
        "fitting": None,
        "now": NOW,
        "patience_seconds": 30.0,
    }
    return RoleInput(**(values | changes))


def test_op_018_auto_replaces_when_the_only_replica_holds_every_gpu() -> None:
    pods = make_pods("old", 1)
    counts = plan_counts(make_input(desired=1, workloads=[make_workload("old", 1)], pods=pods, fitting=0))
    assert counts.mode == "Replace"
    assert counts.reason == ConditionReason.WAITING_FOR_CAPACITY
    assert counts.by_revision == {"old": 0, "new": 0}, "the successor waits until the old one is gone"


def test_op_018_auto_turns_to_replace_when_the_surge_pod_finds_no_room() -> None:
    stuck = make_pod(
        "new-0", revision="new", ready=False, scheduled=False, unschedulable_message="0/1 nodes fit"
    )
    pods = (*make_pods("old", 1), stuck)
    counts = plan_counts(
        make_input(desired=1, workloads=[make_workload("old", 1), make_workload("new", 1)], pods=pods)
    )
    assert (counts.mode, counts.by_revision["old"]) == ("Replace", 0)
    assert "new-0" in counts.message


QUOTA = (
    'pods "new-0" is forbidden: exceeded quota: team, requested: {asked},pods=1,'
    " used: requests.nvidia.com/gpu=2,pods=2, limited: requests.nvidia.com/gpu=2,pods=9"
)


@pytest.mark.parametrize(
    ("message", "count"),
    [
        (QUOTA.format(asked="requests.nvidia.com/gpu=2"), 0),
        (QUOTA.format(asked="requests.nvidia.com/gpu=4"), 1),  # which the quota never allows
        ('pods "new-0" is forbidden: violates PodSecurity "restricted:latest"', 1),
        ('pods "new-0" is forbidden: failed quota: team: must specify requests.memory', 1),
        ("", 1),
    ],
)
def test_op_018_auto_turns_to_replace_where_a_quota_has_no_room_and_for_no_other_refusal(
    message: str, count: int
) -> None:
    """No pod exists that could be stuck, and the nodes have room: a surge would wait for ever."""
    new = dataclasses.replace(make_workload("new", 1), failure_message=message)
    state = make_input(
        desired=1, workloads=[make_workload("old", 1), new], pods=make_pods("old", 1), fitting=9
    )
    counts = plan_counts(state)
    assert counts.by_revision["old"] == count
    assert (counts.reason == ConditionReason.WAITING_FOR_CAPACITY) == (count == 0)
    assert ("quota" in counts.message) == (count == 0)


def test_a_surge_pod_may_wait_for_a_node_that_is_on_its_way() -> None:
    young = make_pod(
        "new-0", revision="new", ready=False, scheduled=False, unschedulable_message="0/1", created_at=NOW - 5
    )
    pods = (*make_pods("old", 1), young)
    counts = plan_counts(
        make_input(desired=1, workloads=[make_workload("old", 1), make_workload("new", 1)], pods=pods)
    )
    assert (counts.mode, counts.by_revision["old"]) == ("Surge", 1)


def test_op_020_a_surge_stays_within_the_spare() -> None:
    old = make_workload("old", 8)
    counts = plan_counts(
        make_input(desired=8, workloads=[old], pods=make_pods("old", 8), strategy="Surge", fitting=1)
    )
    assert counts.by_revision == {"old": 8, "new": 1}


def test_a_surge_without_knowledge_adds_a_quarter() -> None:
    old = make_workload("old", 8)
    counts = plan_counts(make_input(desired=8, workloads=[old], pods=make_pods("old", 8), strategy="Surge"))
    assert counts.by_revision == {"old": 8, "new": 2}


def test_op_021_unready_old_replicas_go_at_once() -> None:
    pods = make_pods("old", 3, ready=False)
    counts = plan_counts(make_input(desired=3, workloads=[make_workload("old", 3)], pods=pods))
    assert counts.by_revision["old"] == 0


def test_op_022_what_is_already_leaving_counts_as_missing() -> None:
    """The count was lowered to 3 a moment ago; four pods still look alive, but one of them is about to go."""
    pods = make_pods("old", 4)
    counts = plan_counts(
        make_input(
            desired=4, workloads=[make_workload("old", 3)], pods=pods, max_unavailable=2, strategy="Surge"
        )
    )
    assert counts.by_revision["old"] == 2


def test_op_023_the_old_replica_stays_until_the_new_one_answers() -> None:
    old, new = make_pods("old", 2), make_pods("new", 1)
    workloads = [make_workload("old", 2), make_workload("new", 1)]
    waiting = make_input(
        desired=2, workloads=workloads, pods=(*old, *new), answering=frozenset(p.uid for p in old)
    )
    assert plan_counts(waiting).by_revision["old"] == 2
    answering = make_input(desired=2, workloads=workloads, pods=(*old, *new))
    assert plan_counts(answering).by_revision["old"] == 1


def test_op_026_an_answering_surge_pod_lets_exactly_one_old_one_go() -> None:
    """By identity: the leaving pod is not counted among those that serve, though it still answers its streams."""
    leaving = make_pod("old-9", revision="old", deleting=True)
    pods = (*make_pods("old", 2), leaving, *make_pods("new", 1))
    counts = plan_counts(
        make_input(
            desired=3,
            workloads=[make_workload("old", 2), make_workload("new", 1)],
            pods=pods,
            answering=frozenset(pod.uid for pod in pods),
        )
    )
    assert counts.by_revision["old"] == 2


def test_op_027_max_unavailable_is_honoured_from_the_start() -> None:
    pods = make_pods("old", 5)
    counts = plan_counts(
        make_input(
            desired=5, workloads=[make_workload("old", 5)], pods=pods, strategy="Replace", max_unavailable=1
        )
    )
    assert counts.by_revision == {"old": 4, "new": 0}


@pytest.mark.parametrize(("leaving", "new"), [(True, 0), (False, 1)])
def test_op_028_replace_waits_until_the_old_pod_is_gone(leaving: bool, new: int) -> None:
    old = make_pods("old", 1, deleting=True) if leaving else ()
    counts = plan_counts(
        make_input(
            desired=1, workloads=[make_workload("old", 0)], pods=old, strategy="Replace", max_unavailable=1
        )
    )
    assert counts.by_revision["new"] == new


def test_op_029_two_plans_from_one_view_ask_for_the_same() -> None:
    state = make_input(desired=3, workloads=[], pods=())
    assert plan_counts(state) == plan_counts(state)
    assert plan_counts(state).by_revision == {"new": 3}


def test_a_finished_revision_goes_only_when_its_last_pod_has_left() -> None:
    leaving = make_pod("old-0", revision="old", deleting=True)
    workloads = [make_workload("old", 0), make_workload("new", 1)]
    assert (
        plan_counts(make_input(desired=1, workloads=workloads, pods=(leaving, *make_pods("new", 1)))).finished
        == ()
    )
    assert plan_counts(make_input(desired=1, workloads=workloads, pods=make_pods("new", 1))).finished == (
        "old",
    )


def test_zero_wanted_brings_everything_to_zero() -> None:
    workloads = [make_workload("old", 2), make_workload("new", 1)]
    counts = plan_counts(
        make_input(desired=0, workloads=workloads, pods=(*make_pods("old", 2), *make_pods("new", 1)))
    )
    assert counts.by_revision == {"old": 0, "new": 0}


def test_the_oldest_revision_gives_way_first() -> None:
    workloads = [
        make_workload("older", 1, created_at=1),
        make_workload("old", 2, created_at=2),
        make_workload("new", 1),
    ]
    pods = (*make_pods("older", 1), *make_pods("old", 2), *make_pods("new", 1))
    counts = plan_counts(make_input(desired=3, workloads=workloads, pods=pods))
    assert (counts.by_revision["older"], counts.by_revision["old"]) == (0, 2)
