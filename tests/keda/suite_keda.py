"""KEDA owns a pool's count: it reads what the autoscaler exports, writes through /scale, and the operator follows.

KEDA, its HPA, Prometheus, API server and operator are real; gateways and engines are fakes that say what the test
tells them. Not collected by `make test`: `make test-keda` builds KEDA and runs this file.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from tests.cluster.test_examples import EXAMPLES
from tests.keda.conftest import Site
from tests.support.kube import wait_for
from tests.support.pools import Manifest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
SYNC_SECONDS = 15.0
"""Period of the HPA controller."""
QUIET_SECONDS = 40.0
"""Longer than two periods."""
IDLE_SECONDS = 8


def make_scaled_object(site: Site, pool: str, *, low: int, **changes: Any) -> Manifest:
    """The ScaledObject of examples/07-keda.yaml for another pool, with times a test can wait for."""
    documents = yaml.safe_load_all((EXAMPLES / "07-keda.yaml").read_text(encoding="utf-8"))
    made: Manifest = next(d for d in documents if d["kind"] == "ScaledObject")
    made["metadata"]["name"] = made["spec"]["scaleTargetRef"]["name"] = pool
    (trigger,) = made["spec"]["triggers"]
    trigger["metadata"]["serverAddress"] = site.prometheus
    query = (
        trigger["metadata"]["query"]
        .replace("keda-chat", pool)
        .replace('"default"', f'"{site.world.namespace}"')
    )
    trigger["metadata"]["query"] = query.replace("< bool 600", f"< bool {IDLE_SECONDS}")
    down = {"scaleDown": {"stabilizationWindowSeconds": 0}}
    made["spec"] |= {
        "minReplicaCount": low,
        "pollingInterval": 1,
        "cooldownPeriod": 2,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": down}},
        **changes,
    }
    return made


def offer(site: Site, pool: str, rate: float, **changes: Any) -> None:
    """Uncached tokens per second that the gateways see from now on; an engine serves 1,000."""
    site.world.gateway.demand[pool] = {
        "uncached_tokens_per_second_15": rate,
        "uncached_tokens_per_second_60": rate,
        "output_tokens_per_second_60": 0.0,
        "last_request_seconds_ago": 0.0,
        **changes,
    }


def wait_count(
    site: Site, pool: str, wanted: Callable[[int], bool], what: str, *, seconds: float = 90.0
) -> int:
    """Wait until KEDA has written a count and the operator has as many replicas; returns the count."""

    def followed() -> tuple[int] | None:
        count = int(site.world.get(pool)["spec"]["replicas"])
        there = len(site.world.list_pods(pool, leaving=True))
        return (count,) if wanted(count) and there == count else None

    try:
        (count,) = wait_for(f"{pool} has {what} replicas", followed, seconds=seconds)
    except AssertionError as error:
        found = site.world.kube.get("keda.sh/v1alpha1", "ScaledObject", pool).get("status")
        raise AssertionError(f"{error}; ScaledObject: {found}\n{site.explain()}") from None
    return int(count)


def find_count_writers(pool: Manifest) -> set[tuple[str, str]]:
    """Field managers of spec.replicas with the subresource they wrote through."""
    return {
        (str(entry["manager"]), str(entry.get("subresource", "")))
        for entry in pool["metadata"]["managedFields"]
        if "f:replicas" in entry["fieldsV1"].get("f:spec", {})
    }


def test_keda_follows_the_demand_and_the_operator_follows_keda(site: Site) -> None:
    world = site.world
    offer(site, "chat", 400.0)
    world.create("chat", replicas=1)
    world.wait_ready("chat")
    world.kube.create(make_scaled_object(site, "chat", low=1))
    condition = world.wait_reason("chat", "ExternalScaler", kind="ScalingActive", seconds=60)
    assert "HorizontalPodAutoscaler keda-hpa-chat" in condition["message"]

    offer(site, "chat", 2_600.0)
    assert wait_count(site, "chat", lambda n: n > 1, "more") == 4, "2,600 tokens/s over 0.8 of 1,000 each"
    ready = world.wait_ready("chat")
    assert find_count_writers(ready) == {("kube-controller-manager", "scale")}, "the HPA that KEDA made"
    assert ready["status"]["desiredReplicas"] == 4
    quiet_generation = ready["metadata"]["generation"]
    time.sleep(QUIET_SECONDS)
    assert world.get("chat")["metadata"]["generation"] == quiet_generation, (
        "nobody writes while nothing changes"
    )

    offer(site, "chat", 300.0)
    wait_count(site, "chat", lambda n: n == 1, "fewer")
    settled = world.wait_ready("chat")
    assert settled["metadata"]["generation"] > quiet_generation
    assert world.list_events("chat", "Conflict") == []
    assert world.get_condition("chat", "Degraded")["reason"] != "Conflict"


def test_an_outage_of_the_numbers_does_not_shrink_a_pool(site: Site) -> None:
    world = site.world
    offer(site, "blind", 1_500.0)
    world.create("blind", replicas=1)
    world.wait_ready("blind")
    world.kube.create(make_scaled_object(site, "blind", low=1))
    wait_count(site, "blind", lambda n: n == 2, "2")
    world.wait_ready("blind")
    world.gateway.unreachable = True
    try:
        offer(site, "blind", 0.0)
        query = f'millpond_operator_scaling_idle_seconds{{pool="blind",pool_namespace="{world.namespace}"}}'
        wait_for("the number is gone", lambda: site.query(query) is None, seconds=30)
        time.sleep(QUIET_SECONDS)
        assert world.get("blind")["spec"]["replicas"] == 2, "an answer without a series is not a zero"
    finally:
        world.gateway.unreachable = False
    wait_count(site, "blind", lambda n: n == 1, "1")


def test_keda_takes_a_pool_to_zero_and_a_held_request_brings_it_back(site: Site) -> None:
    world = site.world
    world.gateway.quiet_pools.add("sleepy")
    offer(site, "sleepy", 200.0)
    world.create("sleepy", replicas=1)
    world.wait_ready("sleepy")
    world.kube.create(make_scaled_object(site, "sleepy", low=0))
    world.wait_reason("sleepy", "ExternalScaler", kind="ScalingActive", seconds=60)
    offer(site, "sleepy", 0.0, last_request_seconds_ago=3_600.0)
    wait_count(site, "sleepy", lambda n: n == 0, "no")
    world.wait_reason("sleepy", "ScaledToZero", seconds=30)
    time.sleep(2 * SYNC_SECONDS)
    assert world.get("sleepy")["spec"]["replicas"] == 0, "nobody asked for a replica"
    offer(site, "sleepy", 0.0, held_requests=1, held_tokens=40)
    started = time.monotonic()
    wait_count(site, "sleepy", lambda n: n == 1, "1", seconds=30)
    assert time.monotonic() - started < SYNC_SECONDS, "KEDA's own loop wakes it, not the HPA's"
    woken = world.wait_ready("sleepy")
    # The API server forgets who wrote a count of 0 through /scale, so there may be nobody; the operator it never is.
    assert find_count_writers(woken) <= {("keda-operator", "scale"), ("kube-controller-manager", "scale")}
    assert "keda-hpa-sleepy" in world.get_condition("sleepy", "ScalingActive")["message"]
