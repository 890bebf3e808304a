"""OP-016: the operator dies at every single write of a pool's life, one after another, and its successor goes on.

A life is a row of changes. Each is walked once undisturbed to count its writes, then again for every write: the process
ends before it (nothing later happened), or before it and the change is taken back while no operator runs, or only this
write is lost while its neighbours of the same round trip are not. Whatever is left must lead to the end that the spec
names, and no step on the way may break what serves.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from tests.support.sim_cluster import SimCluster, make_spec

from millpond_common.contract import labels
from millpond_common.contract.gateway_report import RevisionReport
from millpond_common.contract.reasons import ConditionType
from millpond_operator.api.pool import list_roles
from millpond_operator.api.status import get_condition
from millpond_operator.desired.revision import compute_revision
from millpond_operator.plan.actions import Action, PoolPlan
from millpond_operator.plan.snapshot import PoolSnapshot

MAX_ROUNDS = 120
SLOW = "slow"


ENDS, TAKEN_BACK, LOSES_ONE = "ends", "is taken back", "loses one"


class CrashError(Exception):
    """The process ended here."""


@dataclass
class CrashingCluster(SimCluster):
    """A cluster whose operator dies at one write."""

    crash_at: int | None = None
    how: str = ENDS
    before: dict[str, Any] = field(default_factory=dict)
    """The spec before the change."""
    taken: int = 0
    names: list[str] = field(default_factory=list)

    def execute(self, decided: PoolPlan, *, crash_after: int | None = None) -> None:
        """Writes, then the status, unless the process died."""
        status, taken = self.status, self.taken
        try:
            super().execute(decided, crash_after=crash_after)
        except CrashError:
            self.status = status
            if self.how == TAKEN_BACK:
                change_spec(**self.before)(self)
            return
        if self.how == LOSES_ONE and self.crash_at is not None and taken <= self.crash_at < self.taken:
            self.status = status

    def make_snapshot(self) -> PoolSnapshot:
        """As seen by gateways that count slow answers of replicas of the image "slow"."""
        seen = super().make_snapshot()
        slow = {
            p.revision for p in self.pods.values() if p.annotations["image"] == SLOW and self.is_routed(p)
        }
        counted = tuple(RevisionReport(revision, 50, 0, ((2000, 50),)) for revision in sorted(slow))
        assert seen.gateway is not None
        reports = tuple(msgspec.structs.replace(r, revisions=counted) for r in seen.gateway.reports)
        return dataclasses.replace(seen, gateway=dataclasses.replace(seen.gateway, reports=reports))

    def _take(self, action: Action) -> None:
        number, self.taken = self.taken, self.taken + 1
        self.names.append(type(action).__name__)
        if number != self.crash_at:
            super()._take(action)
        elif self.how != LOSES_ONE:
            raise CrashError


def change_spec(**values: object) -> Callable[[CrashingCluster], None]:
    def act(sim: CrashingCluster) -> None:
        sim.spec |= values
        sim.generation += 1

    return act


def delete(sim: CrashingCluster) -> None:
    sim.deleted_at = sim.tick


def create(_: CrashingCluster) -> None:
    """The pool has just been applied."""


def roll_to_slow(sim: CrashingCluster) -> None:
    """A revision that its gate rejects, on a pool whose next change has no gate any more."""
    gate = {"ttftMilliseconds": 700, "bakeSeconds": 86_400}
    change_spec(engine={"image": SLOW}, rollout={**sim.spec["rollout"], "gate": gate})(sim)


def drop_gate(sim: CrashingCluster) -> None:
    rollout = {name: value for name, value in sim.spec["rollout"].items() if name != "gate"}
    change_spec(engine={"image": "better"}, rollout=rollout)(sim)


CHANGES: dict[str, Callable[[CrashingCluster], None]] = {
    "create": create,
    "roll": change_spec(engine={"image": "better"}),
    "scale up": change_spec(replicas=5),
    "roll to a slow image": roll_to_slow,
    "drop the gate": drop_gate,
    "roll and scale down": change_spec(engine={"image": "best"}, replicas=2),
    "scale down": change_spec(replicas=1),
    "roll to a bad image": change_spec(engine={"image": "bad"}),
    "mend": change_spec(engine={"image": "good"}),
    "to zero": change_spec(replicas=0),
    "from zero": change_spec(replicas=3),
    "delete": delete,
}


def make_cluster(strategy: str) -> CrashingCluster:
    return CrashingCluster(make_spec(replicas=3, strategy=strategy, maxUnavailable=1), gpus=5)


def is_over(sim: CrashingCluster) -> bool:
    """Whether nothing is left to do: the pool is gone, or all is as the spec says and at rest."""
    if sim.deleted_at is not None:
        return not sim.finalizers and not sim.pods
    decided = sim.decide()
    if decided.actions or decided.status is not None:
        return False
    right = [p for p in sim.pods.values() if p.revision == find_revision(sim)]
    if sim.spec["engine"]["image"] == SLOW:
        return get_reason(sim) == "RolledBack" and len(sim.pods) == sim.count_answering()
    if sim.spec["engine"]["image"] in sim.bad_images:
        return bool(right) and sim.tick % 20 == 0  # it never gets ready; some time has passed
    return len(right) == len(sim.pods) == sim.spec["replicas"] == sim.count_answering()


def get_reason(sim: CrashingCluster) -> str:
    ready = get_condition(sim.status, ConditionType.READY)
    return ready.reason if ready is not None else ""


def find_revision(sim: CrashingCluster) -> str:
    pool = sim.make_pool()
    return compute_revision(pool, list_roles(pool)[0])


def run_to_end(sim: CrashingCluster) -> None:
    """Reconcile until all is over; what answers is never fewer than may be missing."""
    for _ in range(MAX_ROUNDS):
        if is_over(sim):
            return
        if sim.deleted_at is not None and not sim.finalizers:
            sim.objects.clear()  # the garbage collector
        before, wanted = sim.count_answering(), sim.spec["replicas"]
        if sim.deleted_at is None or sim.finalizers:
            sim.execute(sim.decide())
        sim.step()
        if sim.deleted_at is None:
            assert sim.count_answering() >= min(before, wanted - 1)
            assert len(sim.pods) <= sim.gpus + wanted
    raise AssertionError(f"not over after {MAX_ROUNDS} rounds: {sim.status}")


def check_end(sim: CrashingCluster) -> None:
    if sim.deleted_at is not None or sim.spec["engine"]["image"] in sim.bad_images:
        return
    revisions = [w["metadata"]["labels"][labels.REVISION] for w in sim.list_workloads()]
    if sim.spec["engine"]["image"] == SLOW:
        assert revisions == [sim.status.revision] != [find_revision(sim)]
        assert len(sim.pods) == sim.spec["replicas"]
        return
    assert revisions == [find_revision(sim)]
    assert sim.finalizers == (labels.FINALIZER,)
    ready = get_condition(sim.status, ConditionType.READY)
    assert ready is not None
    assert (ready.status == "True") == (sim.spec["replicas"] > 0)
    assert not [p for p in sim.pods.values() if p.labels.get(labels.CORDONED)], "nothing stays cordoned"


@pytest.mark.parametrize("strategy", ["Replace", "Auto"])
def test_op_016_every_write_of_a_life_may_be_the_last(strategy: str) -> None:
    sim = make_cluster(strategy)
    walked, kinds = 0, set()
    for name, change in CHANGES.items():
        undisturbed = copy.deepcopy(sim)
        undisturbed.taken = 0
        change(undisturbed)
        run_to_end(undisturbed)
        check_end(undisturbed)
        kinds |= set(undisturbed.names)
        for number in range(undisturbed.taken):
            for how in (ENDS, TAKEN_BACK, LOSES_ONE):
                crashed = copy.deepcopy(sim)
                crashed.taken, crashed.crash_at, crashed.how = 0, number, how
                crashed.before = dict(sim.spec)
                change(crashed)
                try:
                    run_to_end(crashed)
                    check_end(crashed)
                except AssertionError as error:
                    raise AssertionError(f"{name} {how} at write {number}: {error}") from error
                walked += 1
        sim = undisturbed
    assert walked > 100
    assert kinds == {"Apply", "Delete", "MarkPod", "SetFinalizer"}, "a kind of write was never lost"
