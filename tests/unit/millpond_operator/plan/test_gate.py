"""OP-034: a gate's verdict, from what gateways counted to what happens to the replicas."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.support.operator_builders import (
    NOW,
    SETTINGS,
    get_reasons,
    get_role,
    list_applied,
    list_workloads,
    make_child,
    make_gateway_view,
    make_living,
    make_pod,
    make_pool,
    make_revision,
    make_snapshot,
)

from millpond_common.contract import labels
from millpond_common.contract.gateway_report import PoolReport, RevisionReport
from millpond_operator.api.pool import InferencePool
from millpond_operator.api.spec import GateSpec
from millpond_operator.desired.children import make_owner
from millpond_operator.desired.workload import make_record, make_workload_manifest
from millpond_operator.plan.actions import Apply
from millpond_operator.plan.gate import Measured, find_breach, is_baked, measure
from millpond_operator.plan.planner import plan
from millpond_operator.plan.snapshot import Child, GatewayView, Pod, PoolSnapshot

GATE = {"ttftMilliseconds": 700, "errorPercent": 5, "bakeSeconds": 60}
OLD = {"replicas": 2, "rollout": {"gate": GATE}}
NEW = OLD | {"engine": {"image": "engine:2"}}
NEW_REVISION = make_revision(make_pool(**NEW))
OLD_REVISION = make_revision(make_pool(**OLD))


def count(revision: str, *, slow: int = 0, fast: int = 0, failed: int = 0) -> RevisionReport:
    return RevisionReport(revision, slow + fast + failed, failed, ((400, fast), (1500, slow)))


def make_rollout(*, new_ready_for: float, reports: tuple[RevisionReport, ...] = ()) -> PoolSnapshot:
    """Two old replicas and a surge one, all answering, as a gateway sees them."""
    before, after = make_pool(**OLD), make_pool(**NEW, metadata={"generation": 4})
    old = tuple(make_pod(f"old-{i}", revision=OLD_REVISION) for i in range(2))
    new = make_pod("new-0", revision=NEW_REVISION, ready_since=NOW - new_ready_for)
    first, second = make_living(before, pods=old), make_living(after, pods=(new,))
    children = {(c.kind, c.name): c for c in first.children} | {
        (c.kind, c.name): set_count(c, 1) for c in second.children if NEW_REVISION in c.name
    }
    return see(after, (*old, new), tuple(children.values()), reports)


def set_count(child: Child, count: int, pool: InferencePool | None = None) -> Child:
    """The same Deployment as if it had been applied with another count."""
    if child.kind.name != "Deployment":
        return child
    pool = pool or make_pool(**NEW)
    record = make_record(pool, get_role(pool), SETTINGS.build)
    manifest = make_workload_manifest(make_owner(pool), record, replicas=count)
    return make_child(Apply(manifest, 1, uid=None))


def see(
    pool: InferencePool,
    pods: tuple[Pod, ...],
    children: tuple[Child, ...],
    reports: tuple[RevisionReport, ...],
) -> PoolSnapshot:
    """The pool with these pods, all routed and proven, as one gateway that counted `reports` sees it."""
    endpoints = make_gateway_view(*pods).reports[0].endpoints
    gateway = GatewayView(1, 1, (PoolReport("smol", endpoints, revisions=reports),))
    return make_snapshot(
        pool, pods=pods, children=children, workloads=list_workloads(children), gateway=gateway
    )


def find_counts(snapshot: PoolSnapshot) -> dict[str, int]:
    """Counts that the next plan writes, by revision."""
    applied = list_applied(plan(snapshot, SETTINGS, NOW))
    found = [body for name, body in applied.items() if name.startswith("Deployment/smol-")]
    return {body["metadata"]["labels"][labels.REVISION]: body["spec"]["replicas"] for body in found}


@pytest.mark.parametrize(
    ("measured", "breach"),
    [
        (Measured(), ""),
        (Measured(100, 5, 100, 700), ""),
        (Measured(100, 0, 100, 701), "701 ms in 100 requests, the gate allows 700 ms"),
        (Measured(19, 0, 19, 9000), ""),
        (Measured(100, 6, 94, 100), "6 of 100 requests failed (6.0 %), the gate allows 5 %"),
        (Measured(9, 9, 0, None), ""),
        (Measured(10, 10, 0, None), "10 of 10 requests failed (100.0 %), the gate allows 5 %"),
    ],
)
def test_op_034_a_breach_is_told_with_its_numbers(measured: Measured, breach: str) -> None:
    found = find_breach(GateSpec(ttft_milliseconds=700, error_percent=5), measured)
    assert found.endswith(breach)
    assert bool(found) == bool(breach)


def test_a_limit_of_zero_percent_allows_no_failure_at_all() -> None:
    gate = GateSpec(error_percent=0)
    assert find_breach(gate, Measured(1000, 1, 999, 1))
    assert not find_breach(gate, Measured(1000, 0, 1000, 1))


def test_counts_of_all_gateways_are_added_before_the_percentile_is_taken() -> None:
    """One gateway saw only fast ones, the other mostly slow ones: 10 of 110 are slow, so the 95th percentile is."""
    views = (
        PoolReport("smol", (), revisions=(count("new", fast=98), count("old", slow=500))),
        PoolReport("smol", (), revisions=(count("new", fast=2, slow=10, failed=3),)),
    )
    assert measure(GatewayView(2, 2, views), "new") == Measured(113, 3, 110, 1500)
    assert measure(GatewayView(2, 2, views), "unknown") == Measured()


def test_the_bake_counts_from_the_first_answering_replica() -> None:
    gate = GateSpec(bake_seconds=60)
    assert not is_baked(gate, [], NOW)
    assert not is_baked(gate, [make_pod(ready_since=NOW - 59)], NOW)
    assert is_baked(gate, [make_pod(ready_since=NOW - 60), make_pod("b", ready_since=NOW)], NOW)


def test_op_034_old_replicas_stay_while_the_new_revision_bakes() -> None:
    snapshot = make_rollout(new_ready_for=30, reports=(count(NEW_REVISION, fast=100),))
    assert find_counts(snapshot) == {}
    status, reason, message = get_reasons(plan(snapshot, SETTINGS, NOW))["Progressing"]
    assert (status, reason) == ("True", "Baking")
    assert "for 60 s" in message


def test_op_034_old_replicas_leave_after_the_bake() -> None:
    snapshot = make_rollout(new_ready_for=61, reports=(count(NEW_REVISION, fast=100),))
    assert find_counts(snapshot) == {OLD_REVISION: 1}


def test_a_rollout_without_requests_ends_with_the_bake() -> None:
    assert find_counts(make_rollout(new_ready_for=61)) == {OLD_REVISION: 1}


@pytest.mark.parametrize("ready_for", [5, 500], ids=["in the bake", "after it, old replicas are left"])
def test_op_034_a_breach_is_written_down_and_then_rolled_back(ready_for: float) -> None:
    snapshot = make_rollout(new_ready_for=ready_for, reports=(count(NEW_REVISION, slow=30),))
    decided = plan(snapshot, SETTINGS, NOW)
    (verdict,) = [a for a in decided.actions if isinstance(a, Apply) and a.manifest.kind.name == "ConfigMap"]
    notes = verdict.manifest.body["metadata"]["annotations"]
    assert "1500 ms in 30 requests, the gate allows 700 ms" in notes[labels.REJECTED]
    assert notes[labels.FALLBACK_REVISION] == OLD_REVISION
    assert find_counts(snapshot) == {}, "first the verdict, so that a crash forgets nothing"

    after = apply_verdict(snapshot, verdict)
    assert find_counts(after) == {NEW_REVISION: 0}
    reasons = get_reasons(plan(after, SETTINGS, NOW))
    assert reasons["Ready"][:2] == ("False", "RolledBack")
    assert "1500 ms" in reasons["Ready"][2]
    assert OLD_REVISION in reasons["Ready"][2]
    assert reasons["Progressing"][:2] == ("True", "RolledBack")
    status = plan(after, SETTINGS, NOW).status
    assert status is not None
    assert (status.revision, status.ready_replicas) == (OLD_REVISION, 3), (
        "all three answer until one has left"
    )


def apply_verdict(snapshot: PoolSnapshot, verdict: Apply) -> PoolSnapshot:
    made = make_child(verdict)
    others = [c for c in snapshot.children if (c.kind, c.name) != (made.kind, made.name)]
    return dataclasses.replace(snapshot, children=(*others, made))


def make_rolled_back(**spec: Any) -> PoolSnapshot:
    """The rejected revision is gone, its record is not."""
    pool = make_pool(**(NEW | spec), metadata={"generation": 4})
    old = tuple(make_pod(f"old-{i}", revision=OLD_REVISION) for i in range(2))
    base = make_living(make_pool(**OLD), pods=old)
    snapshot = make_rollout(new_ready_for=5, reports=(count(NEW_REVISION, slow=30),))
    verdict = next(
        a
        for a in plan(snapshot, SETTINGS, NOW).actions
        if isinstance(a, Apply) and a.manifest.kind.name == "ConfigMap"
    )
    return apply_verdict(see(pool, old, base.children, ()), verdict)


def test_a_rolled_back_pool_rests_and_keeps_the_verdict() -> None:
    decided = plan(make_rolled_back(), dataclasses.replace(SETTINGS, history=0), NOW)
    assert decided.actions == (), "without its record the revision would be tried again"
    assert get_reasons(decided)["Progressing"][:2] == ("False", "RolledBack")
    assert [(e.warning, e.reason) for e in decided.events] == [(True, "RolledBack")]


def test_another_gate_or_none_lets_the_revision_try_again() -> None:
    for rollout in ({}, {"gate": GATE | {"ttftMilliseconds": 2000}}):
        assert find_counts(make_rolled_back(rollout=rollout))[NEW_REVISION] == 1
    longer = {"gate": GATE | {"bakeSeconds": 600}}
    assert find_counts(make_rolled_back(rollout=longer)) == {}, "the limits are what it missed"


def test_op_034_a_sole_replica_that_had_to_leave_first_comes_back() -> None:
    """Without room for two the old replica is gone before the new one can be measured."""
    one = {"replicas": 1, "rollout": {"gate": GATE, "strategy": "Replace", "maxUnavailable": 1}}
    before, after = make_pool(**one), make_pool(**(one | {"engine": {"image": "engine:2"}}))
    old_revision, new_revision = make_revision(before), make_revision(after)
    new = make_pod("new-0", revision=new_revision, ready_since=NOW - 5)
    first, second = make_living(before, pods=()), make_living(after, pods=(new,))
    children = {(c.kind, c.name): c for c in second.children} | {
        (c.kind, c.name): set_count(c, 0, before) for c in first.children if old_revision in c.name
    }
    baking = see(after, (new,), tuple(children.values()), ())
    decided = plan(baking, SETTINGS, NOW)
    assert decided.actions == (), "the empty Deployment says what to go back to"
    assert get_reasons(decided)["Progressing"][1] == "Baking"
    slow = see(after, (new,), tuple(children.values()), (count(new_revision, slow=30),))
    (verdict,) = plan(slow, SETTINGS, NOW).actions
    assert isinstance(verdict, Apply)
    rolled = apply_verdict(slow, verdict)
    assert find_counts(rolled) == {new_revision: 0}, "there is still no room for both"
    gone = dataclasses.replace(
        rolled,
        pods=(),
        children=tuple(c for c in rolled.children if c.kind.name != "Deployment" or old_revision in c.name),
    )
    gone = dataclasses.replace(gone, workloads=list_workloads(gone.children))
    assert find_counts(gone) == {old_revision: 1}
    later = plan(baking, SETTINGS, NOW + 60)
    assert later.actions == (), "the snapshot's own time counts"
    baked = dataclasses.replace(baking, observed_at=NOW + 60)
    assert [type(action).__name__ for action in plan(baked, SETTINGS, NOW + 60).actions] == ["Delete"]


def test_a_rejected_revision_is_never_gone_back_to() -> None:
    """The next change comes while the rejected one is still leaving."""
    rejected = make_rolled_back()
    newest = make_pool(**(NEW | {"engine": {"image": "engine:3"}}), metadata={"generation": 5})
    bad = make_pod("new-0", revision=NEW_REVISION)
    third = make_pod("third-0", revision=make_revision(newest))
    old = tuple(make_pod(f"old-{i}", revision=OLD_REVISION) for i in range(2))
    deployments = tuple(
        c
        for pool, pods in ((make_pool(**NEW), (bad,)), (newest, (third,)))
        for c in make_living(pool, pods=pods).children
        if make_revision(pool) in c.name and (c.kind.name == "Deployment" or pool is newest)
    )
    snapshot = see(
        newest, (*old, bad, third), (*rejected.children, *deployments), (count(third.revision, slow=30),)
    )
    (verdict,) = [
        a
        for a in plan(snapshot, SETTINGS, NOW).actions
        if isinstance(a, Apply) and a.manifest.kind.name == "ConfigMap"
    ]
    assert verdict.manifest.body["metadata"]["annotations"][labels.FALLBACK_REVISION] == OLD_REVISION


def test_a_pool_at_zero_has_nothing_to_bake() -> None:
    zero = {"replicas": 0, "rollout": {"gate": GATE}}
    before, after = make_pool(**zero), make_pool(**(zero | {"engine": {"image": "engine:2"}}))
    first, second = make_living(before, pods=()), make_living(after, pods=())
    children = {(c.kind, c.name): c for c in (*first.children, *second.children)}
    decided = plan(see(after, (), tuple(children.values()), ()), SETTINGS, NOW)
    assert [type(action).__name__ for action in decided.actions] == ["Delete"], (
        "the old revision ends at once"
    )


def test_a_verdict_whose_fallback_is_gone_counts_no_more() -> None:
    snapshot = make_rolled_back()
    kept = [
        c
        for c in snapshot.children
        if not (c.kind.name == "ConfigMap" and c.labels.get(labels.REVISION) == OLD_REVISION)
    ]
    assert NEW_REVISION in find_counts(dataclasses.replace(snapshot, children=tuple(kept)))


def test_the_first_revision_of_a_pool_has_nothing_to_go_back_to() -> None:
    pool = make_pool(**OLD)
    pods = tuple(make_pod(f"p-{i}", revision=make_revision(pool)) for i in range(2))
    base = make_living(pool, pods=pods)
    slow = (count(make_revision(pool), slow=100),)
    decided = plan(see(pool, pods, base.children, slow), SETTINGS, NOW)
    assert decided.actions == ()
    assert get_reasons(decided)["Ready"][0] == "True"


def test_a_pool_without_gateway_says_that_its_gate_measures_nothing() -> None:
    pool = make_pool(**OLD, gateway={"enabled": False})
    pods = tuple(make_pod(f"p-{i}", revision=make_revision(pool)) for i in range(2))
    reasons = get_reasons(plan(make_living(pool, pods=pods, gateway=None), SETTINGS, NOW))
    assert "spec.rollout.gate" in reasons["Degraded"][2]
