"""The autoscaler on a real control plane: demand in, replicas out, and what the pool says about it.

Gateways and engines are fakes that say what the test tells them; the loop looks every half second.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.fixtures.cluster import Cluster
from tests.support.kube import wait_for
from tests.support.kubelet import Behaviour
from tests.support.operator_world import World, find_condition

from millpond_operator.loop.autoscaler import ScalingSettings

pytestmark = pytest.mark.cluster
FAST = ScalingSettings(interval=0.5, wake_interval=0.3)
SCALING = {"minReplicas": 1, "maxReplicas": 6, "scaleDownStabilizationSeconds": 2}
ZERO = SCALING | {"minReplicas": 0, "idleSeconds": 10, "coldStartHoldSeconds": 60}


@pytest.fixture(scope="module")
def scaled(crds: Cluster) -> Iterator[World]:
    """A world whose autoscaler looks often."""
    made = World(crds.kubeconfig, start_operator=False)
    made.start_operator(scaling=FAST)
    yield made
    made.close()


def offer(world: World, pool: str, rate: float, **changes: Any) -> None:
    """Uncached tokens per second that the gateways see from now on; an idle engine serves 1,000."""
    world.gateway.demand[pool] = {
        "uncached_tokens_per_second_15": rate,
        "uncached_tokens_per_second_60": rate,
        "output_tokens_per_second_60": 0.0,
        "last_request_seconds_ago": 0.0,
        **changes,
    }


def wait_count(world: World, pool: str, count: int) -> None:
    """Wait until exactly `count` replicas are there."""

    def see() -> tuple[object, object]:
        found = world.get(pool)
        return found.get("status", {}).get("scaling"), find_condition(found, "ScalingActive")

    wait_for(
        f"{pool} has {count} replicas",
        lambda: len(world.list_pods(pool, leaving=True)) == count,
        seen=see,
    )


def test_replicas_follow_the_load_up_and_drain_when_it_ends(scaled: World) -> None:
    offer(scaled, "follow", 0.0)
    scaled.behaviours["follow"] = lambda _pod: Behaviour(drain_seconds=math.inf)
    scaled.create("follow", scaling=SCALING)
    scaled.wait_ready("follow")
    wait_count(scaled, "follow", 1)
    offer(scaled, "follow", 3_000.0)
    wait_count(scaled, "follow", 4)
    scaled.wait_ready("follow")
    pool = scaled.wait_pool(
        "follow",
        "the status has the decision",
        lambda pool: (
            (pool["status"]["scaling"]["decision"], pool["status"]["scaling"]["recommendation"]) == (4, 4)
        ),
    )
    scaling = pool["status"]["scaling"]
    assert scaling["reason"] in ("PrefillDemand", "Steady"), "and steady once it is carried out"
    assert (scaling["demandTokensPerSecond"], scaling["capacityTokensPerSecond"]) == (3000, 1000)
    assert scaling["startSeconds"] >= 1
    assert find_condition(pool, "ScalingActive")["status"] == "True"
    assert find_condition(pool, "ScalingLimited")["status"] == "False"
    scaled.wait_event("follow", "PrefillDemand")
    (event,) = scaled.list_events("follow", "PrefillDemand")
    assert event["message"].startswith("from 1 to 4 replicas")
    assert event["count"] == 1
    offer(scaled, "follow", 0.0)
    scaled.wait_pods(
        "follow",
        "three of four are told to leave",
        lambda pods: (
            [bool(p["metadata"].get("deletionTimestamp")) for p in pods].count(True) == 3 and len(pods) == 4
        ),
        leaving=True,
    )
    scaled.behaviours["follow"] = lambda _pod: Behaviour()
    wait_count(scaled, "follow", 1)


def test_op_047_numbers_and_conditions_move_with_the_decision(scaled: World) -> None:
    offer(scaled, "told", 100.0)
    scaled.create("told", scaling=SCALING)
    scaled.wait_ready("told")
    offer(scaled, "told", 50_000.0)
    pool = scaled.wait_pool(
        "told", "limited", lambda pool: find_condition(pool, "ScalingLimited")["reason"] == "MaxReplicas"
    )
    status = pool["status"]
    assert status["scaling"]["demandTokensPerSecond"] == 50_000
    assert status["scaling"]["decision"] == status["desiredReplicas"] == 6
    assert "scaling.maxReplicas is 6" in find_condition(pool, "ScalingLimited")["message"]
    metrics = read_metrics(scaled, "told")
    assert metrics["millpond_operator_scaling_demand_tokens_per_second"] == 50_000
    assert metrics["millpond_operator_scaling_capacity_tokens_per_second"] == 1000
    assert metrics["millpond_operator_scaling_decision_replicas"] == 6


def read_metrics(world: World, pool: str) -> dict[str, float]:
    """Series of the pool that have no further label."""
    operator = world.operator.operator
    assert operator is not None
    labels = {"pool_namespace": world.namespace, "pool": pool}
    return {
        sample.name: sample.value
        for family in operator.metrics.registry.collect()
        for sample in family.samples
        if sample.labels == labels
    }


def test_as_019_a_held_request_wakes_a_pool_at_zero_and_an_idle_one_goes_back(scaled: World) -> None:
    scaled.gateway.quiet_pools.add("sleepy")
    offer(scaled, "sleepy", 0.0, last_request_seconds_ago=None)
    scaled.create("sleepy", scaling=ZERO)
    scaled.wait_reason("sleepy", "ScaledToZero")
    time.sleep(1.5)
    assert scaled.list_pods("sleepy") == [], "nobody asked for a replica"
    offer(scaled, "sleepy", 0.0, held_requests=1, held_tokens=40)
    scaled.wait_pods("sleepy", "one starts", bool)
    scaled.wait_ready("sleepy")
    scaled.wait_event("sleepy", "HeldDemand")
    offer(scaled, "sleepy", 0.0, last_request_seconds_ago=3600.0)
    wait_count(scaled, "sleepy", 0)
    scaled.wait_event("sleepy", "Idle")


def test_op_063_without_data_the_count_is_held_and_the_address_named(scaled: World) -> None:
    offer(scaled, "blind", 2_000.0)
    scaled.create("blind", scaling=SCALING)
    wait_count(scaled, "blind", 3)
    scaled.wait_ready("blind")
    offer(scaled, "blind", 0.0)
    scaled.gateway.unreachable = True
    try:
        condition = scaled.wait_reason("blind", "NoData", kind="ScalingActive")
        assert condition["status"] == "False"
        assert "/v1/report: connection refused" in condition["message"]
        time.sleep(4)
        assert len(scaled.list_pods("blind")) == 3, "an outage of twice the window must not shrink the pool"
        assert "millpond_operator_scaling_demand_tokens_per_second" not in read_metrics(scaled, "blind")
    finally:
        scaled.gateway.unreachable = False
    scaled.wait_reason("blind", "Scaling", kind="ScalingActive")
    wait_count(scaled, "blind", 1)


def test_op_068_as_023_a_new_operator_keeps_the_count_until_data_is_fresh_and_wakes_what_is_asked_for(
    crds: Cluster,
) -> None:
    world = World(crds.kubeconfig, start_operator=False)
    try:
        world.start_operator(scaling=FAST)
        world.create("asleep", scaling=ZERO)
        offer(world, "kept", 4_500.0)
        world.create("kept", scaling=SCALING)
        wait_count(world, "kept", 6)
        world.wait_ready("kept")
        world.operator.stop()
        offer(world, "kept", 0.0, uncached_tokens_per_second_15=None, uncached_tokens_per_second_60=None)
        world.gateway.quiet_pools.add("asleep")
        offer(world, "asleep", 0.0, held_requests=1, held_tokens=9)
        world.start_operator(scaling=FAST, identity="next")
        wait_count(world, "asleep", 1)
        world.wait_reason("kept", "NoData", kind="ScalingActive")
        time.sleep(3)  # longer than the window of 2 s
        assert len(world.list_pods("kept")) == 6
        assert world.get("kept")["status"]["scaling"]["capacityTokensPerSecond"] == 1000
        offer(world, "kept", 100.0)
        wait_count(world, "kept", 1)
    finally:
        world.close()


def test_op_049_op_050_a_real_hpa_owns_a_fixed_count_and_never_a_scaled_one(scaled: World) -> None:
    for name in ("theirs", "ours"):
        offer(scaled, name, 0.0)
    scaled.create("theirs", replicas=1)
    scaled.create("ours", scaling=SCALING)
    for name in ("theirs", "ours"):
        scaled.wait_ready(name)
        scaled.kube.create(make_hpa(name, low=3))
    wait_count(scaled, "theirs", 3)
    scaled.wait_ready("theirs")
    condition = scaled.wait_reason("theirs", "ExternalScaler", kind="ScalingActive")
    assert "Millpond never writes it" in condition["message"]
    found = wait_for("the HPA reports", lambda: find_judged(scaled, "theirs"))
    assert found["AbleToScale"][0] == "True"
    assert "InvalidSelector" not in [reason for _, reason in found.values()]
    selector = scaled.get("theirs")["status"]["selector"]
    assert len(scaled.kube.list("v1", "Pod", label_selector=selector)) == 3

    conflict = scaled.wait_reason("ours", "Conflict", kind="Degraded")
    assert "HorizontalPodAutoscaler ours" in conflict["message"]
    refused = wait_for("the other HPA reports", lambda: find_judged(scaled, "ours"))
    assert refused["AbleToScale"] == ("False", "FailedGetScale"), "a scaled pool has no count to write"
    assert "replicas" not in scaled.get("ours")["spec"]
    assert len(scaled.list_pods("ours")) == 1


def find_judged(world: World, name: str) -> dict[str, tuple[str, str]] | None:
    """Status and reason of each condition of an HPA, once its controller has looked at the pool."""
    hpa = world.kube.get("autoscaling/v2", "HorizontalPodAutoscaler", name)
    found = {c["type"]: (c["status"], c["reason"]) for c in hpa.get("status", {}).get("conditions") or []}
    return found if "AbleToScale" in found else None


def make_hpa(pool: str, *, low: int) -> dict[str, Any]:
    """An HPA of the pool; there are no metrics here, so all it can do is to hold its minimum."""
    metric = {
        "type": "Resource",
        "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}},
    }
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": pool},
        "spec": {
            "scaleTargetRef": {"apiVersion": "millpond.dev/v1alpha1", "kind": "InferencePool", "name": pool},
            "minReplicas": low,
            "maxReplicas": 6,
            "metrics": [metric],
        },
    }
