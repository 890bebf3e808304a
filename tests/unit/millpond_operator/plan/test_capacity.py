"""Room for further replicas."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.operator_builders import get_role, make_pool
from tests.support.operator_builders import make_pod as make_waiting_pod

from millpond_operator.plan.capacity import compute_capacity, compute_rooms, sum_requests
from millpond_operator.plan.problems import find_problem
from millpond_operator.plan.snapshot import Capacity

Manifest = dict[str, Any]


def make_node(name: str = "n", *, ready: bool = True, gpus: int = 4, **spec: Any) -> Manifest:
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    allocatable = {"nvidia.com/gpu": str(gpus), "cpu": "16", "memory": "64Gi", "pods": "110"}
    metadata = {"name": name, "labels": {"zone": "a"}}
    return {
        "metadata": metadata,
        "spec": spec,
        "status": {"conditions": conditions, "allocatable": allocatable},
    }


def make_pod(node: str, gpus: int, *, phase: str = "Running") -> Manifest:
    resources = {"limits": {"nvidia.com/gpu": gpus}, "requests": {"cpu": "1"}}
    return {"spec": {"nodeName": node, "containers": [{"resources": resources}]}, "status": {"phase": phase}}


def count(nodes: list[Manifest], pods: list[Manifest], *, gpus: int = 1, **spec: Any) -> int:
    role = get_role(make_pool(resources={"limits": {"nvidia.com/gpu": gpus}}))
    asked = {
        "containers": [{"resources": {"limits": {"nvidia.com/gpu": gpus}, "requests": {"cpu": "1"}}}],
        **spec,
    }
    return compute_capacity(compute_rooms(nodes, pods), [("both", role, asked)]).fitting_replicas["both"]


def test_what_others_asked_for_is_taken() -> None:
    assert count([make_node()], [make_pod("n", 3)]) == 1
    assert count([make_node()], [make_pod("n", 3)], gpus=2) == 0
    assert count([make_node("a"), make_node("b")], [make_pod("a", 4)], gpus=2) == 2


def test_ended_pods_take_nothing() -> None:
    assert count([make_node()], [make_pod("n", 4, phase="Succeeded")]) == 4


@pytest.mark.parametrize(
    ("node", "spec", "fits"),
    [
        (make_node(ready=False), {}, 0),
        (make_node(unschedulable=True), {}, 0),
        (make_node(), {"nodeSelector": {"zone": "b"}}, 0),
        (make_node(), {"nodeSelector": {"zone": "a"}}, 4),
        (make_node(taints=[{"key": "gpu", "effect": "NoSchedule"}]), {}, 0),
        (make_node(taints=[{"key": "gpu", "effect": "PreferNoSchedule"}]), {}, 4),
        (
            make_node(taints=[{"key": "gpu", "effect": "NoSchedule"}]),
            {"tolerations": [{"operator": "Exists"}]},
            4,
        ),
        (
            make_node(taints=[{"key": "gpu", "value": "x", "effect": "NoSchedule"}]),
            {"tolerations": [{"key": "gpu", "value": "y"}]},
            0,
        ),
    ],
)
def test_a_node_that_cannot_take_the_pod_does_not_count(node: Manifest, spec: Manifest, fits: int) -> None:
    assert count([node], [], **spec) == fits


def test_an_init_container_takes_room_only_beyond_the_others() -> None:
    spec = {
        "containers": [{"resources": {"requests": {"cpu": "2"}}}, {"resources": {"requests": {"cpu": "1"}}}],
        "initContainers": [{"resources": {"requests": {"cpu": "2500m", "memory": "1Gi"}}}],
    }
    assert {name: str(amount) for name, amount in sum_requests(spec).items()} == {
        "cpu": "3",
        "memory": "1073741824",
    }


def test_free_amounts_are_told_readably() -> None:
    role = get_role(make_pool(resources={"limits": {"nvidia.com/gpu": 8, "memory": "1Gi"}}))
    capacity = compute_capacity(
        compute_rooms([make_node()], [make_pod("n", 3)]), [("both", role, {"containers": []})]
    )
    assert capacity.free == {"nvidia.com/gpu": "1", "memory": "64.0Gi"}


def test_what_no_node_has_at_all_is_told_apart_from_what_is_taken() -> None:
    """A replica that would need several nodes waits for ever, so the reason says that it cannot span them."""
    role = get_role(make_pool(resources={"limits": {"nvidia.com/gpu": 8}}, engine={"tensorParallelSize": 8}))
    spec = {"containers": [{"resources": {"limits": {"nvidia.com/gpu": 8}}}]}
    for gpus, beyond in ((4, {"nvidia.com/gpu": "4"}), (8, {})):
        rooms = compute_rooms([make_node("a", gpus=gpus), make_node("b", gpus=2)], [make_pod("a", 1)])
        assert compute_capacity(rooms, [("both", role, spec)]).beyond == beyond
    waiting = make_waiting_pod("p", ready=False, unschedulable_message="0/2 nodes are available")
    found = find_problem(waiting, Capacity({}, {}, {"nvidia.com/gpu": "4"}), "nvidia.com/gpu 8")
    assert found is not None
    assert "the most is 4), and a replica cannot span nodes" in found.message
