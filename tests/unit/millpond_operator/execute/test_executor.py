"""Writes: in order, fenced, remembered, and never over a stranger's object."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.support.operator_builders import NOW, SETTINGS, make_pool, make_snapshot

from millpond_common.contract import labels
from millpond_operator.desired.kinds import DEPLOYMENT
from millpond_operator.errors import ConflictError, NotFoundError, NotLeaderError, UnreachableError
from millpond_operator.execute.events import EventWriter, make_event
from millpond_operator.execute.executor import Executor
from millpond_operator.plan.actions import STAGE_REST, Apply, Delete, EventNote, MarkPod, SetFinalizer
from millpond_operator.plan.planner import plan

POOL = make_pool(replicas=1, metadata={"finalizers": []})
MANAGED = {"manager": labels.MANAGER, "operation": "Update", "fieldsV1": {"f:spec": {"f:type": {}}}}


class Kube:
    """Records writes; `existing` are objects that are there already."""

    def __init__(self, existing: dict[str, dict[str, Any]] | None = None) -> None:
        self.existing = existing or {}
        self.writes: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.forced: list[bool] = []
        self.failure: Exception | None = None
        self.looked: list[str] = []
        self.num_open = 0
        self.busiest = 0

    async def get(self, kind: Any, _namespace: str, name: str) -> dict[str, Any]:
        key = f"{kind.name}/{name}"
        self.looked.append(key)
        if key not in self.existing:
            raise NotFoundError(key)
        return self.existing[key]

    async def apply(
        self, kind: Any, _namespace: str, name: str, body: dict[str, Any], **options: Any
    ) -> dict[str, Any]:
        return await self._write(f"apply {kind.name}/{name}", body, force=options["force"])

    async def merge(
        self, kind: Any, _namespace: str, name: str, body: dict[str, Any], *, manager: str
    ) -> dict[str, Any]:
        assert manager == labels.MANAGER
        return await self._write(f"merge {kind.name}/{name}", body)

    async def create(
        self, kind: Any, _namespace: str, body: dict[str, Any], *, manager: str
    ) -> dict[str, Any]:
        assert manager == labels.MANAGER
        key = f"{kind.name}/{body['metadata']['name']}"
        if key in self.existing:
            raise ConflictError(key)
        self.existing[key] = body
        return await self._write(f"create {key}", body)

    async def delete(self, kind: Any, _namespace: str, name: str, *, uid: str) -> None:
        await self._write(f"delete {kind.name}/{name} {uid}", {})

    async def _write(self, what: str, body: dict[str, Any], *, force: bool = False) -> dict[str, Any]:
        if self.failure is not None:
            raise self.failure
        self.writes.append(what)
        self.bodies.append(body)
        self.forced.append(force)
        self.num_open += 1
        self.busiest = max(self.busiest, self.num_open)
        await asyncio.sleep(0)
        self.num_open -= 1
        return body


def make_executor(kube: Kube, *, leads: bool = True) -> tuple[Executor, list[str]]:
    remembered: list[str] = []

    def fence() -> None:
        if not leads:
            raise NotLeaderError("another leads")

    executor = Executor(kube, fence=fence, remember=lambda kind, _obj: remembered.append(kind.name))  # type: ignore[arg-type]
    return executor, remembered


def plan_first() -> tuple[Any, ...]:
    """What a new pool's first round writes."""
    return plan(make_snapshot(POOL), SETTINGS, NOW).actions


def plan_new() -> tuple[Any, ...]:
    """Everything a new pool needs, as after a first round whose writes were lost but for the finalizer."""
    marked = make_pool(replicas=1)
    return (SetFinalizer(present=True), *plan(make_snapshot(marked), SETTINGS, NOW).actions)


@pytest.mark.parametrize("planned", [plan_first, plan_new])
async def test_workload_record_account_and_finalizer_are_asked_for_together_and_first(planned: Any) -> None:
    kube = Kube()
    executor, remembered = make_executor(kube)
    assert await executor.run(POOL.metadata, planned()) is False
    kinds = [write.split("/")[0].split(" ")[1] for write in kube.writes]
    first_workload = next(i for i, w in enumerate(kube.writes) if w.startswith("create Deployment/smol"))
    assert kinds[:4] == ["Deployment", "ConfigMap", "ServiceAccount", "InferencePool"]
    assert kube.busiest >= 4, "each round trip stands between a pool and its pods"
    finalizer = kube.bodies[kinds.index("InferencePool")]
    assert finalizer["metadata"] == {"name": "smol", "uid": "pool-uid", "finalizers": [labels.FINALIZER]}
    assert len(remembered) == len(kube.writes)
    assert first_workload == 0
    assert kube.looked == [], "a look would cost a round trip"


KINDS = ["ConfigMap", "ServiceAccount", "Deployment", "Service", "PodDisruptionBudget", "RoleBinding"]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stranger_under_any_name_stays_untouched(kind: str) -> None:
    action = next(a for a in plan_new() if isinstance(a, Apply) and a.manifest.kind.name == kind)
    name = f"{kind}/{action.manifest.name}"
    kube = Kube({name: {"metadata": {"name": action.manifest.name, "namespace": "ns", "uid": "theirs"}}})
    executor, _ = make_executor(kube)
    assert await executor.run(POOL.metadata, plan_new()) is True
    assert not [write for write in kube.writes if write.endswith(name)]


async def test_what_a_lost_answer_hid_is_applied_on_the_next_try() -> None:
    """The call before this one made it, but its answer never came, so it is asked for again."""
    action = next(a for a in plan_new() if isinstance(a, Apply) and a.manifest.kind.name == "ConfigMap")
    name = f"ConfigMap/{action.manifest.name}"
    own = {"metadata": {"name": action.manifest.name, "ownerReferences": [{"uid": "pool-uid"}]}}
    kube = Kube({name: own})
    executor, _ = make_executor(kube)
    assert await executor.run(POOL.metadata, plan_new()) is False
    assert f"apply {name}" in kube.writes


async def test_what_another_pools_task_made_in_this_moment_is_not_written_again() -> None:
    """The tasks of all pools of a namespace make its gateway; who comes second finds the very same object."""
    action = next(a for a in plan_new() if isinstance(a, Apply) and a.manifest.name == "millpond-gateway")
    name = f"{action.manifest.kind.name}/{action.manifest.name}"
    kube = Kube({name: dict(action.manifest.body)})
    executor, remembered = make_executor(kube)
    assert await executor.run(POOL.metadata, [action]) is False
    assert (kube.writes, remembered) == ([], [action.manifest.kind.name])


async def test_an_object_that_was_created_is_made_one_that_loses_fields_before_its_first_apply() -> None:
    """An apply drops only what an apply noted before it."""
    action = next(a for a in plan_new() if isinstance(a, Apply) and a.manifest.kind.name == "Service")
    name = f"Service/{action.manifest.name}"
    metadata = {"name": action.manifest.name, "uid": "uid-s", "resourceVersion": "7"}
    kube = Kube({name: {"metadata": {**metadata, "managedFields": [MANAGED]}}})
    executor, _ = make_executor(kube)
    await executor.run(POOL.metadata, [Apply(action.manifest, STAGE_REST, uid="uid-s", adopt=True)])
    assert kube.writes == [f"merge {name}", f"apply {name}"]
    noted = kube.bodies[0]["metadata"]
    assert noted == {"resourceVersion": "7", "managedFields": [{**MANAGED, "operation": "Apply"}]}


async def test_a_stranger_that_took_the_name_of_a_created_object_is_not_adopted() -> None:
    action = next(a for a in plan_new() if isinstance(a, Apply) and a.manifest.kind.name == "Service")
    name = f"Service/{action.manifest.name}"
    metadata = {"name": action.manifest.name, "uid": "theirs", "resourceVersion": "7"}
    kube = Kube({name: {"metadata": {**metadata, "managedFields": [MANAGED]}}})
    executor, _ = make_executor(kube)
    await executor.run(POOL.metadata, [Apply(action.manifest, STAGE_REST, uid="uid-s", adopt=True)])
    assert kube.writes == [f"apply {name}"], "which the API server refuses, since it carries the old uid"


async def test_nothing_is_written_by_an_instance_that_does_not_lead() -> None:
    kube = Kube()
    executor, _ = make_executor(kube, leads=False)
    with pytest.raises(NotLeaderError):
        await executor.run(POOL.metadata, plan_new())
    assert kube.writes == []


async def test_a_strangers_object_stays_untouched_and_is_reported() -> None:
    stranger = {"metadata": {"name": "smol-engines", "namespace": "ns", "uid": "theirs"}}
    kube = Kube({"Service/smol-engines": stranger})
    executor, remembered = make_executor(kube)
    assert await executor.run(POOL.metadata, plan_new()) is True
    assert "apply Service/smol-engines" not in kube.writes
    assert "Service" in remembered


async def test_an_own_object_that_the_store_missed_is_applied() -> None:
    own = {
        "metadata": {
            "name": "smol-engines",
            "namespace": "ns",
            "uid": "x",
            "ownerReferences": [{"uid": "pool-uid"}],
        }
    }
    kube = Kube({"Service/smol-engines": own})
    executor, _ = make_executor(kube)
    assert await executor.run(POOL.metadata, plan_new()) is False
    assert "apply Service/smol-engines" in kube.writes
    forced = dict(zip(kube.writes, kube.forced, strict=True))
    assert forced["apply Service/smol-engines"], "fields that somebody else took of our object come back"
    assert "create PodDisruptionBudget/smol-engine" in kube.writes


async def test_a_name_that_gets_free_while_it_is_looked_at_is_not_forced() -> None:
    action = next(a for a in plan_new() if isinstance(a, Apply) and a.manifest.kind.name == "Service")
    name = f"Service/{action.manifest.name}"

    class Changing(Kube):
        async def get(self, kind: Any, namespace: str, key: str) -> dict[str, Any]:
            self.existing.clear()
            return await super().get(kind, namespace, key)

    kube = Changing({name: {}})
    executor, _ = make_executor(kube)
    assert await executor.run(POOL.metadata, [action]) is False
    assert kube.writes == [f"apply {name}"]
    assert kube.forced == [False], "a stranger who comes in this moment is not overwritten"


async def test_a_known_object_is_written_only_under_its_uid() -> None:
    apply = next(a for a in plan_new() if isinstance(a, Apply))
    known = Apply(apply.manifest, 0, uid="uid-1")
    kube = Kube()
    executor, _ = make_executor(kube)
    await executor.run(POOL.metadata, [known])
    assert kube.bodies[0]["metadata"]["uid"] == "uid-1"
    assert kube.forced == [True]
    assert "uid" not in known.manifest.body["metadata"], "the manifest itself is left as it was"


async def test_deletes_and_the_removal_of_the_finalizer_come_last() -> None:
    kube = Kube()
    executor, _ = make_executor(kube)
    mark = MarkPod("p", "uid-p", {labels.CORDONED: "true"}, {}, "why")
    actions = [SetFinalizer(present=False), Delete(DEPLOYMENT, "d", "uid-d", "why"), mark]
    await executor.run(POOL.metadata, actions)
    assert kube.writes == ["merge Pod/p", "delete Deployment/d uid-d", "apply InferencePool/smol"]
    assert "finalizers" not in kube.bodies[-1]["metadata"]


async def test_every_write_of_a_stage_ends_before_its_failure_is_raised() -> None:
    kube = Kube()
    kube.failure = UnreachableError("busy")
    executor, _ = make_executor(kube)
    with pytest.raises(UnreachableError):
        await executor.run(POOL.metadata, plan_new()[1:])


async def test_op_113_equal_events_are_one_object_with_a_count() -> None:
    kube = Kube()
    writer = EventWriter(kube, fence=lambda: None, instance="test")  # type: ignore[arg-type]
    note = EventNote(True, "CrashLoop", "Reconcile", "boom")
    for _ in range(3):
        await writer.write(POOL.metadata, note, NOW)
    assert [write.split(" ")[0] for write in kube.writes] == ["create", "merge", "merge"]
    assert kube.bodies[1]["count"] == 2


def test_an_event_fits_the_api_servers_bounds() -> None:
    event = make_event(
        POOL.metadata, EventNote(False, "Answering", "Reconcile", "x" * 5000), NOW, instance="i"
    )
    assert len(event["message"]) == 1024
    assert (event["type"], event["metadata"]["namespace"]) == ("Normal", "ns")
    assert event["involvedObject"]["uid"] == "pool-uid"
