"""Deleted pools drain, then everything goes; nothing waits for ever."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.kube import wait_for
from tests.support.kubelet import Behaviour
from tests.support.operator_world import World
from tests.support.running_operator import make_lease

from millpond_common.contract import labels

pytestmark = pytest.mark.cluster


@contextlib.contextmanager
def make_other_namespace(world: World) -> Iterator[str]:
    """A namespace beside the world's, for the time of the block."""
    name = f"{world.namespace}-sys"
    world.kube.core.create_namespace({"metadata": {"name": name, "labels": {"millpond.dev/test": "true"}}})
    try:
        yield name
    finally:
        world.kube.core.delete_namespace(name, grace_period_seconds=0)


def test_a_deleted_pool_drains_before_it_goes(world: World) -> None:
    world.create("leaves", replicas=2)
    world.wait_ready("leaves")
    world.behaviours["leaves"] = lambda _pod: Behaviour(drain_seconds=math.inf)
    world.delete("leaves")
    condition = world.wait_reason("leaves", "Draining")
    assert "2 replicas still to leave" in condition["message"]
    pods = world.wait_pods("leaves", "both are told to leave", are_leaving, leaving=True)
    assert [p["metadata"]["labels"].get(labels.CORDONED) for p in pods] == ["true", "true"]
    world.look("leaves")
    assert world.exists("leaves"), "it went before its replicas"
    world.behaviours["leaves"] = lambda _pod: Behaviour()
    wait_for("the pool is gone", lambda: not world.exists("leaves"))
    assert world.list_pods("leaves", leaving=True) == []
    wait_for("the garbage collector took the children", lambda: not world.list_workloads("leaves"))


def are_leaving(pods: list[dict[str, Any]]) -> bool:
    return all(pod["metadata"].get("deletionTimestamp") for pod in pods)


def test_op_009_deletion_while_no_operator_runs(own_world: World) -> None:
    world = own_world
    first = world.start_operator()
    world.create("orphan", replicas=1)
    world.create("escaped", replicas=1)
    world.wait_ready("orphan")
    world.wait_ready("escaped")
    first.stop()
    world.delete("orphan")
    world.delete("escaped")
    assert world.exists("orphan"), "without an operator the drain has not happened"
    world.patch("escaped", {"metadata": {"finalizers": None}})
    wait_for("the documented escape works", lambda: not world.exists("escaped"))
    world.start_operator()
    wait_for("the deletion completes", lambda: not world.exists("orphan"))


def test_op_009_a_namespace_with_a_pool_can_be_deleted(own_world: World) -> None:
    """The operator and its Lease live elsewhere: where they do not, they go too, and only the escape is left."""
    world = own_world
    with make_other_namespace(world) as elsewhere:
        running = world.start_operator(lease=make_lease(elsewhere))
        world.create("inside", replicas=1)
        world.wait_ready("inside")
        world.kube.core.delete_namespace(world.namespace)
        wait_for("the pool is gone", lambda: not world.exists("inside"))
        running.stop()


def test_the_gateway_goes_with_the_last_pool(own_world: World) -> None:
    world = own_world
    world.start_operator()
    for name in ("one", "two"):
        world.create(name, replicas=1)
    world.wait_ready("one")
    world.wait_ready("two")
    world.delete("one")
    wait_for("the first pool is gone", lambda: not world.exists("one"))
    world.look("two", times=2)
    world.wait_ready("two")
    assert world.kube.exists("apps/v1", "Deployment", "millpond-gateway")
    world.delete("two")
    wait_for("the second pool is gone", lambda: not world.exists("two"))
    wait_for(
        "so is the gateway",
        lambda: not world.kube.exists("apps/v1", "Deployment", "millpond-gateway"),
    )
