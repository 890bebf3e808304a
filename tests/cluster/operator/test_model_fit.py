"""A model whose size is known is judged on the real API server, and no pod of it starts where it cannot fit."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from kubernetes.client.exceptions import ApiException
from tests.fixtures.cluster import Cluster
from tests.support.kube import Kube
from tests.support.kubelet import Behaviour
from tests.support.operator_builders import get_role, make_pool
from tests.support.operator_world import World

from millpond_operator.clients.connection import load_connection
from millpond_operator.clients.kube import KubeClient
from millpond_operator.observe.nodes import NodeWatcher
from millpond_operator.plan.capacity import NodeRoom
from millpond_operator.plan.devices import find_device_memory
from millpond_operator.plan.snapshot import DeviceMemory

pytestmark = pytest.mark.cluster

FACTS = {
    "numParameters": 13_015_864_320,
    "dtype": "BFloat16",
    "numLayers": 40,
    "numKvHeads": 40,
    "headDim": 128,
    "maxModelTokens": 32768,
}
TOLD = json.dumps({"reason": "Fetched", "message": "9 files", "model": FACTS})
MODEL = {"source": "hf://owner/large"}
ENGINE = {"maxModelTokens": 32768}


def test_op_091_a_model_too_large_is_refused_with_numbers_until_the_spec_changes(world: World) -> None:
    world.behaviours["large"] = lambda _pod: Behaviour(init_message=TOLD, ready_after_seconds=None)
    limits = {"limits": {"cpu": "1", "memory": "24Gi"}}
    world.create("large", replicas=1, model=MODEL, engine=ENGINE, resources=limits)
    condition = world.wait_reason("large", "ModelTooLarge", kind="ModelFits")
    assert condition["status"] == "False"
    for number in (
        "weights 24.24 GiB",
        "32768 tokens 25.00 GiB",
        "gets 24.00 GiB",
        "free after weights 0.00",
    ):
        assert number in condition["message"]
    assert world.get_condition("large")["reason"] == "ModelTooLarge"
    world.wait_pods("large", "none is left", lambda pods: pods == [], leaving=True)
    assert world.get("large")["status"]["model"]["numParameters"] == FACTS["numParameters"]
    assert world.wait_event("large", "ModelTooLarge")["type"] == "Warning"

    # Another pool with the same files is refused before its first pod.
    world.create("twin", replicas=1, model=MODEL, engine=ENGINE, resources=limits)
    world.wait_reason("twin", "ModelTooLarge")
    world.look("twin", times=3)
    time.sleep(1)  # a controller would need less to make a pod
    assert world.list_pods("twin", leaving=True) == []

    world.behaviours["large"] = lambda _pod: Behaviour(init_message=TOLD)
    world.patch("large", {"spec": {"resources": {"limits": {"memory": "64Gi"}}}})
    world.wait_ready("large")
    assert world.get_condition("large", "ModelFits")["status"] == "True"


def test_op_091_an_unknown_model_is_allowed_and_the_condition_says_so(world: World) -> None:
    world.create("unknown", replicas=1)
    world.wait_ready("unknown")
    condition = world.get_condition("unknown", "ModelFits")
    assert (condition["status"], condition["reason"]) == ("True", "ModelFits")
    world.behaviours["waiting"] = lambda _pod: Behaviour(ready_after_seconds=None)
    world.create("waiting", replicas=1)
    condition = world.wait_reason("waiting", "ModelSizeUnknown", kind="ModelFits")
    assert condition["status"] == "Unknown"


def test_op_091_a_bad_size_cannot_be_kept(world: World) -> None:
    """The estimate is never zero: neither the operator nor anybody else can write one."""
    world.create("sized", replicas=0)
    bad = {"status": {"model": {**FACTS, "files": "x", "numParameters": 0}}}
    resource = world.kube.resource("millpond.dev/v1alpha1", "InferencePool")
    with pytest.raises(ApiException) as refused:
        resource.status.patch(
            name="sized",
            namespace=world.namespace,
            body=bad,
            content_type="application/merge-patch+json",
        )
    assert "status.model.numParameters" in refused.value.body


def test_the_memory_of_gpus_is_read_from_the_labels_of_real_nodes(crds: Cluster) -> None:
    kube, name = Kube(crds.kubeconfig), f"gpu-{time.time_ns()}"
    kube.core.create_node(
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": {"nvidia.com/gpu.memory": "24576", "test": name}},
            # It would take pods of others otherwise, and run none of them.
            "spec": {"taints": [{"key": "millpond.dev/test-node", "effect": "NoSchedule"}]},
        }
    )
    status = {
        "conditions": [{"type": "Ready", "status": "True", "reason": "Test", "message": "a test's node"}],
        "allocatable": {"nvidia.com/gpu": "1", "cpu": "8", "memory": "64Gi", "pods": "10"},
        "capacity": {"nvidia.com/gpu": "1", "cpu": "8", "memory": "64Gi", "pods": "10"},
    }
    try:
        kube.core.patch_node_status(name, {"status": status})
        rooms = asyncio.run(fetch_rooms(crds))
        pool = make_pool(resources={"limits": {"nvidia.com/gpu": 1}})
        spec = {"nodeSelector": {"test": name}, "tolerations": [{"operator": "Exists"}]}
        found = find_device_memory(rooms, get_role(pool), spec)
        assert found == DeviceMemory(24 << 30, f"label nvidia.com/gpu.memory of node {name}")
    finally:
        kube.core.delete_node(name)


async def fetch_rooms(cluster: Cluster) -> tuple[NodeRoom, ...]:
    client = KubeClient(load_connection(cluster.kubeconfig, None))
    try:
        rooms = await NodeWatcher(client, time.monotonic, enabled=True).fetch_rooms()
        assert rooms is not None
        return rooms
    finally:
        await client.close()
