"""A deleted pool ends, in order, and at the latest at its deadline."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import Any

from tests.support.operator_builders import (
    NOW,
    SETTINGS,
    get_reasons,
    make_living,
    make_pod,
    make_pool,
    make_revision,
)

from millpond_common.contract import labels
from millpond_operator.plan.actions import Apply, Delete, MarkPod, SetFinalizer
from millpond_operator.plan.planner import plan
from millpond_operator.plan.snapshot import PoolSnapshot


def make_deleted(seconds_ago: float, *, num_pods: int = 1, **metadata: Any) -> PoolSnapshot:
    pool = make_pool(replicas=num_pods, rollout={"drainSeconds": 100})
    pods = tuple(make_pod(f"pod-{n}", revision=make_revision(pool)) for n in range(num_pods))
    stamp = datetime.fromtimestamp(NOW - seconds_ago, UTC).isoformat()
    deleted = make_pool(
        replicas=num_pods, rollout={"drainSeconds": 100}, metadata={"deletionTimestamp": stamp, **metadata}
    )
    return dataclasses.replace(make_living(pool, pods=pods), pool=deleted)


def test_replicas_are_cordoned_and_counted_down() -> None:
    decided = plan(make_deleted(1, num_pods=2), SETTINGS, NOW)
    marks = [action for action in decided.actions if isinstance(action, MarkPod)]
    assert [mark.labels for mark in marks] == [{labels.CORDONED: "true"}] * 2
    (apply,) = [action for action in decided.actions if isinstance(action, Apply)]
    assert apply.manifest.body["spec"]["replicas"] == 0
    assert apply.uid is not None, "a Deployment that is gone must not be made again"
    assert get_reasons(decided)["Ready"][1] == "Draining"


def test_the_finalizer_goes_when_the_last_replica_has_left() -> None:
    snapshot = make_deleted(1, num_pods=1)
    (workload,) = snapshot.workloads
    empty = dataclasses.replace(snapshot, pods=(), workloads=(dataclasses.replace(workload, wanted=0),))
    assert plan(empty, SETTINGS, NOW).actions == (SetFinalizer(present=False),)


def test_no_new_replica_may_be_on_its_way() -> None:
    empty = dataclasses.replace(make_deleted(1), pods=())
    assert SetFinalizer(present=False) not in plan(empty, SETTINGS, NOW).actions


def test_the_finalizer_never_waits_beyond_its_deadline() -> None:
    leaving = make_deleted(100 + 30 + 61, num_pods=1)
    assert plan(leaving, SETTINGS, NOW).actions == (SetFinalizer(present=False),)


def test_a_pool_whose_finalizer_is_gone_is_left_to_the_garbage_collector() -> None:
    assert plan(make_deleted(1, finalizers=[]), SETTINGS, NOW).actions == ()


def test_a_deployment_without_record_is_deleted_instead() -> None:
    snapshot = make_deleted(1)
    without = tuple(child for child in snapshot.children if child.kind.name != "ConfigMap")
    decided = plan(dataclasses.replace(snapshot, children=without), SETTINGS, NOW)
    assert [a.name for a in decided.actions if isinstance(a, Delete)] == [snapshot.workloads[0].name]
    assert not [a for a in decided.actions if isinstance(a, Apply)]
