"""Leader election: one holder, by the local clock only."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from millpond_operator.errors import ConflictError, NotFoundError, NotLeaderError, UnreachableError
from millpond_operator.loop.lease import LeaseKeeper, LeaseSettings

SETTINGS = LeaseSettings(namespace="ns", duration=15, deadline=10, period=2)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Kube:
    """One Lease with compare-and-swap."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.down = False
        self.version = 0

    async def get(self, *_: object) -> dict[str, Any]:
        self._check()
        if self.lease is None:
            raise NotFoundError("none")
        return copy.deepcopy(self.lease)

    async def create(
        self, _kind: object, _namespace: str, body: dict[str, Any], *, manager: str
    ) -> dict[str, Any]:
        self._check()
        if self.lease is not None:
            raise ConflictError(f"exists, {manager}")
        return self._keep(body)

    async def replace(
        self, _kind: object, _namespace: str, _name: str, body: dict[str, Any]
    ) -> dict[str, Any]:
        self._check()
        assert self.lease is not None
        if body["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise ConflictError("changed")
        return self._keep(body)

    def _check(self) -> None:
        if self.down:
            raise UnreachableError("down")

    def _keep(self, body: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.lease = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.version)}}
        return self.lease


def make(kube: Kube, name: str, clock: Clock) -> LeaseKeeper:
    return LeaseKeeper(kube, SETTINGS, identity=name, clock=clock)  # type: ignore[arg-type]


async def test_the_first_leads_and_the_second_waits() -> None:
    kube, clock = Kube(), Clock()
    one, two = make(kube, "one", clock), make(kube, "two", clock)
    await one._step()
    await two._step()
    one.check()
    with pytest.raises(NotLeaderError):
        two.check()
    assert two.holder == "one"


async def test_op_064_the_second_takes_over_only_after_the_record_stood_still() -> None:
    kube, clock = Kube(), Clock()
    one, two = make(kube, "one", clock), make(kube, "two", clock)
    await one._step()
    for _ in range(10):
        clock.now += 2
        await one._step()
        await two._step()
        assert not two.is_leader
    clock.now += 14
    await two._step()
    assert not two.is_leader
    assert not one.is_leader, "a leader that did not renew stops writing before anyone may take over"
    clock.now += 2
    await two._step()
    assert two.is_leader
    await one._step()
    assert not one.is_leader
    assert one.holder == "two"


async def test_a_leader_that_cannot_renew_stops_writing_at_its_deadline() -> None:
    kube, clock = Kube(), Clock()
    one = make(kube, "one", clock)
    await one._step()
    kube.down = True
    clock.now += 9
    with pytest.raises(UnreachableError):
        await one._step()
    one.check()
    clock.now += 2
    with pytest.raises(NotLeaderError):
        one.check()
    assert not one.gained.is_set()


async def test_a_lost_race_is_no_leadership() -> None:
    kube, clock = Kube(), Clock()
    one, two = make(kube, "one", clock), make(kube, "two", clock)
    await one._step()
    await one.release()
    stale = await kube.get()
    await two._step()
    assert two.is_leader
    with pytest.raises(ConflictError):
        await kube.replace(None, "ns", "x", stale)


async def test_a_released_lease_is_free_at_once() -> None:
    kube, clock = Kube(), Clock()
    one, two = make(kube, "one", clock), make(kube, "two", clock)
    await one._step()
    await two._step()
    await one.release()
    assert not one.is_leader
    await two._step()
    assert two.is_leader
    assert kube.lease is not None
    assert kube.lease["spec"]["leaseTransitions"] >= 1


async def test_a_lease_that_vanished_comes_back_only_after_its_duration() -> None:
    kube, clock = Kube(), Clock()
    one, two = make(kube, "one", clock), make(kube, "two", clock)
    await one._step()
    await two._step()
    kube.lease = None
    for _ in range(7):
        await one._step()
        await two._step()
        assert kube.lease is None, "an uninstall would leave it behind"
        assert not one.is_leader
        clock.now += 2
    clock.now += 2
    await two._step()
    await one._step()
    assert (one.is_leader, two.is_leader) == (False, True)


async def test_a_lease_without_a_record_is_taken_at_once() -> None:
    kube, clock = Kube(), Clock()
    kube.lease = {"metadata": {"name": "millpond-operator", "resourceVersion": "0"}}
    one = make(kube, "one", clock)
    await one._step()
    assert one.is_leader
