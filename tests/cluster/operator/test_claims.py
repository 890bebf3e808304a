"""Resource claims on the real API server: what pods ask for, what is free, and what the status says."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from tests.fixtures.cluster import Cluster
from tests.support.kube import Kube
from tests.support.operator_world import World

from millpond_operator.api.pool import parse_pool
from millpond_operator.clients.connection import load_connection
from millpond_operator.clients.kube import KubeClient
from millpond_operator.observe.claims import ClaimWatcher
from millpond_operator.plan.snapshot import ClaimNeed, ClaimRoom

pytestmark = pytest.mark.cluster

API = "resource.k8s.io/v1"
POOL = ("millpond.dev/v1alpha1", "InferencePool")


@pytest.fixture
def devices(crds: Cluster, world: World) -> Iterator[str]:
    """Four devices of a class of the test's own on one node, one of them held by somebody's claim."""
    kube, name = Kube(crds.kubeconfig, world.namespace), f"t{uuid.uuid4().hex[:8]}"
    driver = f"{name}.example.com"
    expression = f"device.driver == '{driver}' && device.attributes['{driver}'].type == 'gpu'"
    entries = [
        {
            "name": f"gpu-{n}",
            "attributes": {"type": {"string": "gpu"}},
            "capacity": {"memory": {"value": "24Gi"}},
        }
        for n in range(4)
    ]
    request = {"name": "gpu", "exactly": {"deviceClassName": name, "count": 2}}
    objects: list[dict[str, Any]] = [
        {"kind": "DeviceClass", "spec": {"selectors": [{"cel": {"expression": expression}}]}},
        {
            "kind": "ResourceSlice",
            "spec": {
                "driver": driver,
                "nodeName": name,
                "pool": {"name": name, "generation": 1, "resourceSliceCount": 1},
                "devices": entries,
            },
        },
        {"kind": "ResourceClaimTemplate", "spec": {"spec": {"devices": {"requests": [request]}}}},
        {"kind": "ResourceClaim", "spec": {"devices": {"requests": [request]}}},
    ]
    for entry in objects:
        kube.create({"apiVersion": API, "metadata": {"name": name}, **entry})
    result = {"request": "gpu", "driver": driver, "pool": name, "device": "gpu-0"}
    kube.resource(API, "ResourceClaim").status.patch(
        name=name,
        namespace=world.namespace,
        body={"status": {"allocation": {"devices": {"results": [result]}}}},
        content_type="application/merge-patch+json",
    )
    yield name
    for entry in reversed(objects):
        kube.delete(API, entry["kind"], name)


def make_claiming(name: str) -> dict[str, Any]:
    return {
        "resources": {"limits": {"memory": "1Gi"}, "claims": [{"name": "gpu"}]},
        "template": {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": name}]},
    }


async def look(cluster: Cluster, pool: Any) -> tuple[dict[str, ClaimNeed], dict[str, ClaimRoom]]:
    client = KubeClient(load_connection(cluster.kubeconfig))
    try:
        watcher = ClaimWatcher(client, time.monotonic, cluster_wide=True)
        needs = await watcher.fetch_needs(pool)
        return needs, await watcher.fetch_rooms(needs)
    finally:
        await client.close()


def test_op_092_devices_of_a_claim_are_counted_in_budget_and_status(
    crds: Cluster, world: World, devices: str
) -> None:
    world.create("claiming", replicas=2, **make_claiming(devices))
    world.wait_ready("claiming")
    pods = world.list_pods("claiming")
    assert [pod["spec"]["containers"][0]["resources"]["claims"] for pod in pods] == [[{"name": "gpu"}]] * 2
    world.wait_status("claiming", "counts them", lambda status: status["roles"][0].get("devices") == 4)
    needs, rooms = asyncio.run(look(crds, parse_pool(world.get("claiming"))))
    assert needs == {"Both": ClaimNeed(devices, 2)}
    assert rooms["Both"].free == {devices: 3}
    assert rooms["Both"].memory[devices].num_bytes == 24 << 30


def test_a_template_that_is_missing_is_waited_for(world: World) -> None:
    """Kubernetes holds the pod back; the number of devices stays unknown instead of zero."""
    world.create("unclaimed", replicas=1, **make_claiming("absent"))
    world.wait_ready("unclaimed")
    world.look("unclaimed", times=2)
    assert "devices" not in world.get("unclaimed")["status"]["roles"][0]
