"""One task per pool: it waits, backs off, gives way, and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from millpond_operator.errors import NotLeaderError, ThrottledError, UnreachableError
from millpond_operator.loop import manager as module
from millpond_operator.loop.manager import Manager
from millpond_operator.loop.metrics import Metrics
from millpond_operator.loop.reconciler import Outcome

Reconcile = Callable[[str, str], Awaitable[Outcome | None]]


def make_manager(
    reconcile: Reconcile, *, leads: bool = True, synced: bool = True, spacing_seconds: float = 0.0
) -> Manager:
    may_write, is_synced = asyncio.Event(), asyncio.Event()
    if leads:
        may_write.set()
    if synced:
        is_synced.set()
    return Manager(
        reconcile,
        metrics=Metrics(),
        may_write=may_write,
        is_synced=is_synced,
        spacing_seconds=spacing_seconds,
    )


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_marked_pool_is_reconciled_and_a_mark_while_it_waits_wakes_it() -> None:
    seen: list[tuple[str, str]] = []

    async def reconcile(namespace: str, name: str) -> Outcome:
        seen.append((namespace, name))
        return Outcome(60.0, wrote=False)

    manager = make_manager(reconcile)
    manager.mark("ns", "a")
    manager.mark("ns", "b")
    await settle()
    assert sorted(seen) == [("ns", "a"), ("ns", "b")]
    manager.mark("ns", "a")
    await settle()
    assert seen.count(("ns", "a")) == 2
    await manager.close()


async def test_marks_during_a_reconcile_lead_to_one_more() -> None:
    runs: list[int] = []
    gate = asyncio.Event()

    async def reconcile(_namespace: str, _name: str) -> Outcome:
        runs.append(len(runs))
        await gate.wait()
        return Outcome(60.0, wrote=False)

    manager = make_manager(reconcile)
    manager.mark("ns", "a")
    await settle()
    for _ in range(10):
        manager.mark("ns", "a")
    gate.set()
    await settle()
    assert len(runs) == 2
    await manager.close()


@pytest.mark.parametrize(("leads", "synced"), [(False, True), (True, False)])
async def test_nothing_happens_before_the_lists_and_the_lease(leads: bool, synced: bool) -> None:
    seen: list[str] = []

    async def reconcile(_namespace: str, name: str) -> Outcome:
        seen.append(name)
        return Outcome(60.0, wrote=False)

    manager = make_manager(reconcile, leads=leads, synced=synced)
    manager.mark("ns", "a")
    await settle()
    assert seen == []
    await manager.close()


async def test_a_pool_that_is_gone_ends_its_task() -> None:
    async def reconcile(_namespace: str, _name: str) -> None:
        return None

    manager = make_manager(reconcile)
    manager.mark("ns", "a")
    await settle()
    assert manager.metrics.pools._value.get() == 0
    await manager.close()


async def test_a_lost_lease_never_spins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reconcile that is refused at once, without any wait in it, must leave the loop to the Lease's own task."""
    monkeypatch.setattr(module, "NOT_LEADER_SECONDS", 0.01)
    calls: list[int] = []

    async def reconcile(_namespace: str, _name: str) -> Outcome:
        calls.append(1)
        raise NotLeaderError("another leads")

    manager = make_manager(reconcile)
    manager.mark("ns", "a")
    async with asyncio.timeout(1):
        await asyncio.sleep(0.05)
    assert 1 <= len(calls) <= 10
    await manager.close()


async def test_errors_back_off_and_a_bug_in_one_pool_leaves_the_others_alone() -> None:
    seen: list[str] = []

    async def reconcile(_namespace: str, name: str) -> Outcome:
        seen.append(name)
        if name == "bug":
            raise RuntimeError("a bug")
        if name == "down":
            raise UnreachableError("no API server")
        return Outcome(60.0, wrote=False)

    manager = make_manager(reconcile)
    for name in ("bug", "down", "fine"):
        manager.mark("ns", name)
    await settle()
    assert sorted(seen) == ["bug", "down", "fine"]
    await asyncio.sleep(0.02)
    assert len(seen) == 3, "a failure is not repeated at once"
    await manager.close()


async def test_a_throttled_pool_waits_as_long_as_the_server_asks() -> None:
    async def reconcile(_namespace: str, _name: str) -> Outcome:
        raise AssertionError

    manager = make_manager(reconcile, synced=False)
    manager.mark("ns", "a")
    task = manager._tasks["ns", "a"]
    assert task._back_off(ThrottledError("slow down", retry_after_seconds=7.0)) >= 7.0
    delays = [task._back_off(UnreachableError("x")) for _ in range(20)]
    assert max(delays) <= module.MAX_BACKOFF_SECONDS
    assert delays[-1] >= module.MAX_BACKOFF_SECONDS / 2
    await manager.close()


async def test_writes_are_followed_at_once_but_not_for_ever() -> None:
    async def reconcile(_namespace: str, _name: str) -> Outcome:
        raise AssertionError

    manager = make_manager(reconcile, synced=False)
    manager.mark("ns", "a")
    task = manager._tasks["ns", "a"]
    busy = [task._pace(Outcome(0.0, wrote=True)) for _ in range(6)]
    assert busy[:3] == [0.0, 0.0, 0.0]
    assert busy[3:] == sorted(busy[3:])
    assert busy[3] > 0
    quiet = [task._pace(Outcome(1.0, wrote=False)) for _ in range(30)]
    assert quiet[-1] == module.MAX_QUIET_SECONDS
    assert task._pace(Outcome(1.0, wrote=True)) == 1.0
    await manager.close()


async def test_a_burst_of_marks_is_answered_at_once_and_then_once_more() -> None:
    at: list[float] = []

    async def reconcile(_namespace: str, _name: str) -> Outcome:
        at.append(asyncio.get_running_loop().time())
        return Outcome(60.0, wrote=False)

    manager = make_manager(reconcile, spacing_seconds=1.0)
    for _ in range(10):
        manager.mark("ns", "a")
        await asyncio.sleep(0.005)
    await asyncio.sleep(1.5)
    assert len(at) == 2
    assert at[1] - at[0] >= 0.9
    await manager.close()


async def test_delays_after_errors_differ_between_pools() -> None:
    """A server that comes back is not met by all pools in the same moment."""

    async def reconcile(_namespace: str, _name: str) -> Outcome:
        raise AssertionError

    manager = make_manager(reconcile, synced=False)
    for number in range(50):
        manager.mark("ns", f"p-{number}")
    tasks = list(manager._tasks.values())
    for attempt in range(4):
        delays = [task._back_off(UnreachableError("x")) for task in tasks]
        low = module.FIRST_BACKOFF_SECONDS * 2**attempt / 2
        assert min(delays) >= low
        assert max(delays) <= 2 * low
        assert len({round(delay / low, 2) for delay in delays}) > 20
    await manager.close()
