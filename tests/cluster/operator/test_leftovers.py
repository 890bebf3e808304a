"""What must be gone afterwards: of a second revision, and of a field that a manifest no longer has."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from kubernetes import client
from tests.fixtures.cluster import Cluster
from tests.support.kube import wait_for
from tests.support.operator_world import World

from millpond_common.contract import labels
from millpond_operator.clients.connection import load_connection
from millpond_operator.clients.kube import KubeClient
from millpond_operator.desired.kinds import SERVICE
from millpond_operator.desired.manifest import Manifest, make_manifest
from millpond_operator.execute.executor import Executor
from millpond_operator.observe.parse import parse_child
from millpond_operator.observe.store import was_created
from millpond_operator.plan.actions import STAGE_REST, Apply
from millpond_operator.plan.children import make_apply
from millpond_operator.plan.drift import has_drifted

pytestmark = pytest.mark.cluster

CHILDREN = (
    ("v1", "Service"),
    ("v1", "ServiceAccount"),
    ("policy/v1", "PodDisruptionBudget"),
    ("networking.k8s.io/v1", "NetworkPolicy"),
)


def list_names(world: World, pool: str) -> list[str]:
    """Everything a pool has besides its Deployments, pods and records."""
    found = [o for kind in CHILDREN for o in world.kube.list(*kind, label_selector=f"{labels.POOL}={pool}")]
    return sorted(f"{o['kind']}/{o['metadata']['name']}" for o in found)


def test_op_031_of_two_revisions_that_shared_the_traffic_only_the_wanted_one_is_left(world: World) -> None:
    """Nine replicas of one and one of the other serve together for as long as a bake lasts; then it is called off."""
    name = "shared-out"
    world.create(name, replicas=3, rollout={"gate": {"ttftMilliseconds": 700, "bakeSeconds": 86_400}})
    old = world.wait_ready(name)["status"]["revision"]
    before = list_names(world, name)
    world.patch(name, {"spec": {"engine": {"maxModelTokens": 4096}}})

    def list_serving() -> set[str]:
        report = asyncio.run(world.gateway.fetch_report("gateway"))
        (pool,) = (entry for entry in report.pools if entry.pool == name)
        return {endpoint.revision for endpoint in pool.endpoints if endpoint.routable}

    wait_for("both revisions get requests", lambda: len(list_serving()) == 2)
    assert len(world.list_workloads(name)) == 2
    world.patch(name, {"spec": {"engine": None, "rollout": {"gate": None}}})
    world.wait_pods(
        name,
        "only the first revision",
        lambda pods: len(pods) == 3 and {p["metadata"]["labels"][labels.REVISION] for p in pods} == {old},
        leaving=True,
    )
    wait_for("one Deployment is left", lambda: len(world.list_workloads(name)) == 1)
    assert world.wait_ready(name)["status"]["revision"] == old
    assert list_serving() == {old}
    assert list_names(world, name) == before
    assert not [p for p in world.list_pods(name) if labels.CORDONED in p["metadata"]["labels"]]


def make_service(namespace: str, **own_labels: str) -> Manifest:
    spec = {"clusterIP": "None", "ports": [{"name": "http", "port": 80, "protocol": "TCP"}]}
    if "extra" in own_labels:
        spec["selector"] = {"app": "x"}
    return make_manifest(
        SERVICE, namespace, "written", own_labels=own_labels, owners=[], content={"spec": spec}
    )


def test_what_was_created_loses_what_a_later_manifest_no_longer_has(crds: Cluster, own_world: World) -> None:
    """A create and an apply are noted apart: without care the first one's fields would stay for ever."""
    namespace = own_world.namespace
    first, later = make_service(namespace, app="x", extra="y"), make_service(namespace, app="x")

    async def write() -> list[dict[str, Any]]:
        client = KubeClient(load_connection(crds.kubeconfig))
        executor = Executor(client, fence=lambda: None, remember=lambda _kind, _obj: None)
        pool: Any = None  # only marks and finalizers are about the pool itself
        seen = []
        try:
            await executor.run(pool, [Apply(first, STAGE_REST, uid=None)])
            for manifest in (later, later):
                live = await client.get(SERVICE, namespace, "written")
                seen.append(live)
                child = parse_child(SERVICE, live, created=was_created(live))
                if has_drifted(manifest, child):
                    await executor.run(pool, [make_apply(manifest, STAGE_REST, child)])
            seen.append(await client.get(SERVICE, namespace, "written"))
        finally:
            await client.close()
        return seen

    created, applied, last = asyncio.run(write())
    assert was_created(created)
    assert created["metadata"]["labels"] == {"app": "x", "extra": "y"}
    assert applied["metadata"]["labels"] == {"app": "x"}
    assert "selector" not in applied["spec"]
    assert not was_created(applied)
    assert last["metadata"]["resourceVersion"] == applied["metadata"]["resourceVersion"], (
        "nothing is left to do"
    )


TWICE = {
    "tolerations": [
        {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "gpu", "operator": "Exists", "effect": "NoExecute"},
    ],
    "topologySpreadConstraints": [
        {"maxSkew": skew, "topologyKey": "zone", "whenUnsatisfiable": when, "labelSelector": {}}
        for skew, when in ((1, "ScheduleAnyway"), (2, "DoNotSchedule"))
    ],
    "volumes": [{"name": "data", "emptyDir": {}}],
    "volumeMounts": [
        {"name": "data", "mountPath": "/one", "subPath": "one"},
        {"name": "data", "mountPath": "/two", "subPath": "two"},
    ],
}


def test_a_template_whose_lists_name_one_thing_twice_is_written_once(world: World) -> None:
    selector = {"nodeSelector": {"millpond.dev/test-node": world.kubelet.node}}
    world.create("twice", replicas=1, template=selector | TWICE)
    world.wait_ready("twice")
    world.look("twice", times=2)
    before = world.count_calls()["apply", "Deployment"]
    world.look("twice", times=3)
    after = world.count_calls()["apply", "Deployment"]
    assert after == before, "an apply that changes nothing is a call all the same"
    (workload,) = world.list_workloads("twice")
    assert len(workload["spec"]["template"]["spec"]["tolerations"]) >= 2


def test_a_replica_that_its_node_evicted_is_replaced_and_counts_no_more(world: World) -> None:
    """Its object stays for days, and neither Ready nor the end of the pool waits for it."""
    name = "evicted"
    world.create(name, replicas=1)
    world.wait_ready(name)
    (pod,) = world.list_pods(name)
    lost = str(pod["metadata"]["name"])
    told = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
    world.kube.core.patch_namespaced_pod_status(lost, world.namespace, {"status": told})
    world.wait_pods(name, "a second one", lambda pods: len(pods) == 2)
    status = world.wait_ready(name)["status"]
    assert (status["replicas"], status["readyReplicas"], status["updatedReplicas"]) == (1, 1, 1)
    assert lost in {p["metadata"]["name"] for p in world.list_pods(name)}, "nobody has removed it"
    world.delete(name)
    wait_for("the pool is gone", lambda: not world.exists(name))


def test_op_074_the_binding_of_another_release_gives_way(own_world: World) -> None:
    """The chart was removed and installed under another name while pools served."""
    world = own_world
    first = world.start_operator()
    world.create("moved", replicas=1)
    world.wait_ready("moved")
    (pod,) = world.list_pods("moved")
    binding = ("rbac.authorization.k8s.io/v1", "RoleBinding", "millpond-gateway")
    assert world.kube.get(*binding)["roleRef"]["name"] == first.settings.plan.build.gateway_role_name
    first.stop()
    build = dataclasses.replace(first.settings.plan.build, gateway_role_name="another-gateway")
    world.start_operator(plan=dataclasses.replace(first.settings.plan, build=build))
    wait_for(
        "the binding is to the new role",
        lambda: [b["roleRef"]["name"] for b in world.kube.list(*binding[:2])] == [build.gateway_role_name],
    )
    world.look("moved", times=2)
    world.wait_ready("moved")
    assert [p["metadata"]["name"] for p in world.list_pods("moved")] == [pod["metadata"]["name"]]


def test_op_001_the_gateway_stays_at_the_count_a_scaler_gave_it(own_world: World) -> None:
    world = own_world
    operator = world.start_operator()
    world.create("scaled-gateway", replicas=1)
    world.wait_ready("scaled-gateway")
    apps, name = client.AppsV1Api(world.kube.api_client), labels.GATEWAY_NAME
    for count in (3, 2):
        apps.patch_namespaced_deployment_scale(name, world.namespace, {"spec": {"replicas": count}})
        world.look("scaled-gateway", times=3)
        operator.resync()
        world.look("scaled-gateway", times=2)
        seen = apps.read_namespaced_deployment(name, world.namespace)
        assert seen.spec.replicas == count
    world.wait_ready("scaled-gateway")
