"""OP-012: what a watch missed is found by the next full list, and a process that lists no more is no longer alive."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.running_operator import make_settings

from millpond_common.contract import labels
from millpond_operator.clients.connection import load_connection
from millpond_operator.clients.kube import ObjectList
from millpond_operator.desired.kinds import DEPLOYMENT, POD, POOL
from millpond_operator.errors import UnreachableError
from millpond_operator.loop.metrics import Metrics
from millpond_operator.loop.operator import MISSED_RESYNCS, Operator
from millpond_operator.loop.resync import EARLY_SECONDS, WATCHED, Resync
from millpond_operator.observe.store import Store

PERIOD = 300.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Kube:
    """Lists what it is told, by plural."""

    def __init__(self) -> None:
        self.objects: dict[str, list[dict[str, Any]]] = {}
        self.version = 10
        self.selectors: dict[str, str | None] = {}
        self.down = False

    async def list(self, kind: Any, _namespace: str | None, *, labels: str | None = None) -> ObjectList:
        if self.down:
            raise UnreachableError("no answer")
        self.selectors[kind.plural] = labels
        return ObjectList(tuple(self.objects.get(kind.plural, ())), self.version)


def make_object(name: str, *, version: int, pool: str | None = None) -> dict[str, Any]:
    own = {labels.POOL: pool} if pool is not None else {}
    metadata = {"name": name, "namespace": "ns", "uid": f"uid-{name}", "resourceVersion": str(version)}
    return {"metadata": {**metadata, "labels": own}, "spec": {}}


def make_resync(kube: Kube, clock: Clock) -> tuple[Resync, Store, list[str], Metrics]:
    store, marked, metrics = Store(), [], Metrics()
    resync = Resync(
        kube,  # type: ignore[arg-type]
        store,
        namespaces=(),
        mark=lambda _namespace, name: marked.append(name),
        metrics=metrics,
        clock=clock,
        period_seconds=PERIOD,
    )
    return resync, store, marked, metrics


def read_repairs(metrics: Metrics, kind: str) -> float:
    return metrics.registry.get_sample_value("millpond_operator_watch_repairs_total", {"kind": kind}) or 0.0


async def test_op_012_a_list_finds_what_the_watch_missed_and_marks_the_pool() -> None:
    kube, clock = Kube(), Clock()
    resync, store, marked, metrics = make_resync(kube, clock)
    kube.objects = {
        POOL.plural: [make_object("smol", version=5)],
        DEPLOYMENT.plural: [make_object("smol-1", version=6, pool="smol")],
    }
    await resync.run_once()
    assert resync.synced.is_set()
    assert "smol" in marked
    assert read_repairs(metrics, "Deployment") == 0, "a first list repairs nothing"
    marked.clear()
    await resync.run_once()
    assert marked == [], "nothing changed"
    kube.objects[DEPLOYMENT.plural] = [make_object("smol-1", version=16, pool="smol")]
    kube.version = 20
    await resync.run_once()
    assert marked == ["smol"]
    assert read_repairs(metrics, "Deployment") == 1
    kube.objects[DEPLOYMENT.plural] = []
    await resync.run_once()
    assert store.keys(DEPLOYMENT) == []
    assert read_repairs(metrics, "Deployment") == 2


async def test_what_went_while_the_watches_began_is_found_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watches' own first lists do not name it, and nothing else ever will."""
    kube, clock = Kube(), Clock()
    resync, store, marked, _ = make_resync(kube, clock)
    kube.objects = {
        POOL.plural: [make_object("smol", version=5)],
        POD.plural: [make_object("smol-1", version=6, pool="smol")],
    }
    pauses: list[float] = []

    async def go_on(seconds: float) -> None:
        assert (store.keys(POD) == []) is bool(pauses)
        kube.objects[POD.plural] = []
        kube.version += 1
        pauses.append(seconds)
        if len(pauses) == 4:
            raise asyncio.CancelledError

    monkeypatch.setattr("millpond_operator.loop.resync.asyncio.sleep", go_on)
    with pytest.raises(asyncio.CancelledError):
        await resync.run()
    assert pauses == [*EARLY_SECONDS, PERIOD, PERIOD]
    assert marked == ["smol", "smol", "smol", "smol"]


async def test_only_pools_are_listed_without_a_selector() -> None:
    kube = Kube()
    resync, *_ = make_resync(kube, Clock())
    await resync.run_once()
    assert set(kube.selectors) == {kind.plural for kind in WATCHED}
    assert [plural for plural, selector in kube.selectors.items() if selector is None] == [POOL.plural]


async def test_a_failed_list_leaves_the_age_to_grow() -> None:
    kube, clock = Kube(), Clock()
    resync, *_ = make_resync(kube, clock)
    clock.now += 7
    assert (resync.age_seconds, resync.blind_seconds) == (None, 7), (
        "no list yet is no age, and no list all the same"
    )
    await resync.run_once()
    clock.now += 50
    kube.down = True
    with pytest.raises(UnreachableError):
        await resync.run_once()
    assert (resync.age_seconds, resync.blind_seconds) == (50, 50)


def make_operator(folder: Path) -> Operator:
    """An instance that has not been started, of a cluster that is not there."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    gateway: Any = object()
    return Operator(make_settings("ns"), load_connection(path), gateway)


async def test_op_012_liveness_and_readiness_follow_the_lists(tmp_path: Path) -> None:
    operator, kube, clock = make_operator(tmp_path), Kube(), Clock()
    operator.resync._kube = kube  # type: ignore[assignment]
    operator.resync._clock = clock
    assert operator.find_problem() is None, "it has just started"
    assert operator.find_unready() == "the first full lists are not in"
    await operator.resync.run_once()
    assert operator.find_unready() is None
    clock.now += MISSED_RESYNCS * operator.settings.resync_seconds
    assert operator.find_problem() is None
    clock.now += 1
    assert "no full list has succeeded for 901 seconds" in (operator.find_problem() or "")
    await operator.kube.close()
