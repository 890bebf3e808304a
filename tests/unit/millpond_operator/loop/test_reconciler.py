"""One round: what is written, in which order, and what a refusal on the way leaves behind."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.operator_builders import (
    NOW,
    SETTINGS,
    make_container,
    make_living,
    make_pod,
    make_pool,
    make_revision,
    make_snapshot,
)
from tests.support.pools import make_pool as make_object

from millpond_operator.api.status import PoolStatus, dump_status
from millpond_operator.errors import ForbiddenError, KubeError, NotLeaderError, UnreachableError
from millpond_operator.loop.reconciler import Reconciler
from millpond_operator.loop.status_pace import HOLD_SECONDS
from millpond_operator.plan.snapshot import Pod

POOL = make_pool(replicas=1)


class World:
    """Observer, executor, status and event writer in one, which fails where it is told to."""

    def __init__(self, **failures: Exception) -> None:
        self.failures = failures
        self.done: list[str] = []
        self.strangers = 0
        self.now = 0.0
        self.pods: tuple[Pod, ...] | None = None
        self.status: PoolStatus | None = None
        self.pool = POOL
        self.raw = make_object("smol", replicas=1)
        self.raw["metadata"] |= {"namespace": "ns", "uid": "pool-uid", "generation": 3}

    def get_raw(self, _namespace: str, _name: str) -> dict[str, Any] | None:
        return None if "gone" in self.done else self.raw

    async def observe(self, _namespace: str, _name: str, _now: float) -> Any:
        return make_snapshot(self.pool) if self.pods is None else make_living(self.pool, pods=self.pods)

    def take_status(self) -> None:
        """As the API server would."""
        assert self.status is not None
        self.pool = make_pool(replicas=1, status=dump_status(self.status))

    async def run(self, _pool: Any, _actions: Any) -> bool:
        self._do("run")
        self.strangers -= 1
        return self.strangers >= 0

    async def write(self, _pool: Any, *rest: Any) -> None:
        if len(rest) == 1:
            self.status = rest[0]
        self._do("status" if len(rest) == 1 else "event")

    def _do(self, what: str) -> None:
        self.done.append(what)
        if what in self.failures:
            raise self.failures[what]


def make_reconciler(world: World) -> Reconciler:
    same: Any = world
    return Reconciler(
        observer=same,
        executor=same,
        status=same,
        events=same,
        settings=SETTINGS,
        clock=lambda: NOW,
        monotonic=lambda: world.now,
    )


async def test_children_then_status_then_events() -> None:
    world = World()
    outcome = await make_reconciler(world).reconcile("ns", "smol")
    assert outcome is not None
    assert outcome.wrote
    assert world.done[:2] == ["run", "status"]
    assert set(world.done[2:]) == {"event"}


@pytest.mark.parametrize("error", [ForbiddenError("no right to events"), UnreachableError("no answer")])
async def test_a_lost_event_costs_nothing_else(error: Exception) -> None:
    """The status holds the same; repeating the whole round would not bring the event back either."""
    world = World(event=error)
    assert await make_reconciler(world).reconcile("ns", "smol") is not None
    assert "status" in world.done


async def test_an_event_of_an_instance_that_lost_the_lease_ends_the_round() -> None:
    with pytest.raises(NotLeaderError):
        await make_reconciler(World(event=NotLeaderError("another leads"))).reconcile("ns", "smol")


async def test_a_lasting_refusal_is_reported_and_raised_and_one_that_passes_is_only_raised() -> None:
    world = World(run=ForbiddenError("may not create deployments"))
    with pytest.raises(KubeError):
        await make_reconciler(world).reconcile("ns", "smol")
    assert world.done[:2] == ["run", "status"]
    world = World(run=UnreachableError("no answer"))
    with pytest.raises(KubeError):
        await make_reconciler(world).reconcile("ns", "smol")
    assert world.done == ["run"]


async def test_a_strangers_object_leads_to_another_plan_in_the_same_round_but_not_for_ever() -> None:
    world = World()
    world.strangers = 5
    await make_reconciler(world).reconcile("ns", "smol")
    assert world.done.count("run") == 2
    assert world.done.count("status") == 1


async def test_a_pool_that_is_gone_ends() -> None:
    world = World()
    world.done.append("gone")
    assert await make_reconciler(world).reconcile("ns", "smol") is None


async def test_steps_on_the_way_are_told_together_and_what_matters_at_once() -> None:
    world = World()
    world.pods = (make_pod(revision=make_revision(POOL), ready=False),)
    reconciler = make_reconciler(world)
    await reconciler.reconcile("ns", "smol")
    assert world.done.count("status") == 1, "the first status of a generation is waited for"
    world.take_status()
    world.pods = (make_pod(revision=make_revision(POOL), ready=False, containers=(make_container(),)),)
    outcome = await reconciler.reconcile("ns", "smol")
    assert world.done.count("status") == 1, "a replica that goes from starting to loading"
    assert outcome is not None
    assert outcome.wrote, "what waits to be written is not quiet, or the task would look less and less often"
    assert 0 < outcome.recheck_seconds <= HOLD_SECONDS, "told soon even if nothing happens any more"
    world.now += HOLD_SECONDS
    await reconciler.reconcile("ns", "smol")
    assert world.done.count("status") == 2
    world.take_status()
    world.pods = (make_pod(revision=make_revision(POOL)),)
    await reconciler.reconcile("ns", "smol")
    assert world.done.count("status") == 3, "Ready is told at once"
