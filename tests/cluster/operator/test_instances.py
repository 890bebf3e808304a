"""Several instances, restarts, crashes, upgrades, strangers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest
import yaml
from tests.support.kube import wait_for
from tests.support.operator_world import World
from tests.support.running_operator import RunningOperator, make_lease

from millpond_common.contract import labels
from millpond_operator.errors import UnreachableError

pytestmark = pytest.mark.cluster

QUIET_SECONDS = 2.0
"""Several looks at the Lease, and time enough for a write that must not come."""
WRITES = ("apply", "create", "patch", "delete", "update")


def test_op_064_one_instance_acts_and_the_other_takes_over(own_world: World) -> None:
    world = own_world
    first = world.start_operator(identity="first")
    world.create("led", replicas=1)
    world.wait_ready("led")
    second = world.start_operator(identity="second")
    assert first.operator is not None
    assert second.operator is not None
    wait_for("the second has its lists", second.operator.resync.synced.is_set)
    for _ in range(10):
        second.mark("led")
    time.sleep(QUIET_SECONDS)
    assert not second.operator.lease.is_leader
    calls = Counter(verb for verb, _ in world.count_calls().elements())
    assert sum(calls[verb] for verb in WRITES) == 0, "the waiting instance wrote"
    assert second.operator.lease.holder == "first"
    first.stop()
    wait_for("the second leads", lambda: second.operator is not None and second.operator.lease.is_leader)
    world.patch("led", {"spec": {"replicas": 2}})
    assert world.wait_ready("led")["status"]["readyReplicas"] == 2


class Killed:
    """Lets each pool's first n writes through, and no further one: what a killed process leaves behind."""

    def __init__(self, running: RunningOperator, limits: dict[str, int]) -> None:
        assert running.operator is not None
        self._send = running.operator.kube._send
        self.limits = limits
        self.done: Counter[str] = Counter()
        running.operator.kube._send = self.send  # type: ignore[method-assign]

    async def send(self, verb: str, kind: Any, method: str, path: str, **rest: Any) -> Any:
        about = path + (str(rest["content"]) if verb == "create" else "")
        pool = next((name for name in self.limits if f"/{name}" in about or is_about(name, about)), None)
        if verb in WRITES and pool is not None and kind.name != "Lease":
            if self.done[pool] >= self.limits[pool]:
                await asyncio.sleep(0)
                raise UnreachableError("this process was killed")
            self.done[pool] += 1
        return await self._send(verb, kind, method, path, **rest)


def is_about(pool: str, content: str) -> bool:
    """Whether a new object is a pool's child or an event about it, and not the gateway that pools share."""
    child = f'"{labels.POOL}":"{pool}"' in content
    return child or f'"kind":"InferencePool","name":"{pool}","namespace"' in content


def test_op_016_an_operator_killed_behind_each_single_write(own_world: World) -> None:
    """Pool crash-n lost its operator after n writes; its successor brings every one of them to the same end."""
    world = own_world
    first = world.start_operator()
    limits = {f"crash-{number:02}": number for number in range(12)}
    killed = Killed(first, limits)
    for name in limits:
        world.create(name, replicas=2)
    wait_for(
        "every pool has used its writes", lambda: all(killed.done[n] == limits[n] for n in list(limits)[:9])
    )
    first.stop()
    world.start_operator()
    for name in limits:
        status = world.wait_ready(name)["status"]
        assert status["readyReplicas"] == status["replicas"] == 2
        (deployment,) = world.list_workloads(name)
        assert deployment["metadata"]["name"] == f"{name}-{status['revision']}"
    made = world.kube.list("v1", "Service", label_selector=labels.POOL)
    assert sorted(s["metadata"]["name"] for s in made) == sorted(f"{name}-engines" for name in limits)


@pytest.mark.slow
def test_op_016_an_operator_killed_behind_each_write_of_a_rollout_and_of_a_deletion(own_world: World) -> None:
    """As above, later in life: each pool rolls and shrinks, then is deleted, and loses its operator on the way."""
    world = own_world
    first = world.start_operator()
    names = [f"late-{number:02}" for number in range(10)]
    for name in names:
        world.create(name, replicas=2)
    old = {name: world.wait_ready(name)["status"]["revision"] for name in names}
    limits = {name: number for number, name in enumerate(names)}
    killed = Killed(first, limits)
    for name in names:
        world.patch(name, {"spec": {"engine": {"maxModelTokens": 4096}, "replicas": 1}})
    wait_for("the writes are used up", lambda: all(killed.done[n] == limits[n] for n in names[:8]))
    first.stop()
    second = world.start_operator()
    for name in names:
        status = world.wait_ready(name)["status"]
        assert status["revision"] != old[name]
        wait_for(f"{name} has one Deployment", lambda n=name: len(world.list_workloads(n)) == 1)
        (pod,) = world.wait_pods(name, "one", lambda pods: len(pods) == 1, leaving=True)
        assert labels.CORDONED not in pod["metadata"]["labels"]
    limits = {name: number // 2 for number, name in enumerate(names)}
    killed = Killed(second, limits)
    for name in names:
        world.delete(name)
    wait_for("the writes are used up", lambda: all(killed.done[n] == limits[n] for n in names[:6]))
    second.stop()
    world.start_operator()
    for name in names:
        wait_for(f"{name} is gone", lambda n=name: not world.exists(n))
        wait_for(f"so is its Deployment ({name})", lambda n=name: not world.list_workloads(n))


def test_a_restarted_operator_finds_everything_as_it_should_be(own_world: World) -> None:
    """What a list says must equal what a watch says, or each restart would write every object again."""
    world = own_world
    first = world.start_operator()
    for name in ("calm", "quiet"):
        world.create(name, replicas=1)
        world.wait_ready(name)
    first.stop()
    second = world.start_operator()
    assert second.operator is not None
    wait_for("the second leads", lambda: second.operator is not None and second.operator.lease.is_leader)
    wait_for("the second has its lists", second.operator.resync.synced.is_set)
    for _ in range(3):  # the first look asks the replicas anew, and their answers make another
        second.look("calm")
        second.look("quiet")
        second.resync()
    written = Counter(
        {call: n for call, n in world.count_calls().items() if call[0] in WRITES and call[1] != "Lease"}
    )
    assert written == Counter()


def test_op_019_an_upgraded_operator_restarts_no_engine(own_world: World) -> None:
    world = own_world
    old = world.start_operator(engine_image="engine:1")
    world.create("steady", replicas=2)
    world.wait_ready("steady")
    pods = {pod["metadata"]["uid"] for pod in world.list_pods("steady")}
    old.stop()
    new = world.start_operator(engine_image="engine:2")
    assert new.operator is not None
    wait_for("the new one leads", lambda: new.operator is not None and new.operator.lease.is_leader)
    new.look("steady", times=2)
    new.resync()
    new.look("steady")
    assert {pod["metadata"]["uid"] for pod in world.list_pods("steady")} == pods
    world.patch("steady", {"spec": {"engine": {"maxModelTokens": 4096}}})
    world.wait_ready("steady")
    assert {p["spec"]["containers"][0]["image"] for p in world.list_pods("steady")} == {"engine:2"}


PEERING_CRD = """
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: kopfpeerings.kopf.dev}
spec:
  group: kopf.dev
  scope: Namespaced
  names: {kind: KopfPeering, plural: kopfpeerings, singular: kopfpeering}
  versions:
  - name: v1
    served: true
    storage: true
    schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
"""


def test_op_013_a_strangers_peering_does_not_pause_us(own_world: World) -> None:
    world = own_world
    crd = yaml.safe_load(PEERING_CRD)
    world.kube.apply(crd)
    try:
        peering = {
            "apiVersion": "kopf.dev/v1", "kind": "KopfPeering", "metadata": {"name": "default"},
            "status": {"stranger": {"priority": 100, "lifetime": 3600, "lastseen": "2099-01-01T00:00:00+00:00"}},
        }  # fmt: skip
        wait_for("the kind is served", lambda: _try_create(world, peering))
        world.start_operator()
        world.create("unpaused", replicas=1)
        world.wait_ready("unpaused")
    finally:
        world.kube.delete("apiextensions.k8s.io/v1", "CustomResourceDefinition", "kopfpeerings.kopf.dev")


def _try_create(world: World, manifest: dict[str, Any]) -> bool:
    from kubernetes.client.exceptions import ApiException
    from kubernetes.dynamic.exceptions import ResourceNotFoundError

    try:
        world.kube.create(manifest)
    except (ApiException, ResourceNotFoundError):
        return False
    return True


def _is_ours(found: dict[str, Any]) -> bool:
    """Whether the operator wrote it; Kubernetes' own controllers post some events in `default`."""
    managers = {entry["manager"] for entry in found["metadata"].get("managedFields") or ()}
    return bool(managers & {labels.MANAGER})


def test_op_090_children_and_events_are_in_the_pools_namespace(own_world: World) -> None:
    world = own_world
    elsewhere = f"{world.namespace}-sys"
    world.kube.core.create_namespace(
        {"metadata": {"name": elsewhere, "labels": {"millpond.dev/test": "true"}}}
    )
    try:
        running = world.start_operator(lease=make_lease(elsewhere))
        world.create("apart", replicas=1)
        world.wait_ready("apart")
        world.wait_event("apart", "Answering")
        running.stop()
        for kind in (("v1", "ConfigMap"), ("v1", "Service"), ("apps/v1", "Deployment"), ("v1", "Event")):
            for namespace in (elsewhere, "default"):
                found = world.kube.list(*kind, namespace=namespace)
                ours = [o for o in found if "apart" in o["metadata"]["name"] and _is_ours(o)]
                assert ours == [], f"{kind[1]} in {namespace}"
        assert world.kube.exists("coordination.k8s.io/v1", "Lease", "millpond-operator", elsewhere)
    finally:
        world.kube.core.delete_namespace(elsewhere, grace_period_seconds=0)
