from __future__ import annotations

import copy
from typing import Any

import pytest

from millpond_gateway.routing.records import Policy, Role
from millpond_gateway.world.parse import parse_pool, parse_replica

POD: dict[str, Any] = {
    "metadata": {
        "name": "p-1",
        "uid": "u-1",
        "labels": {"millpond.dev/pool": "chat", "millpond.dev/revision": "r1", "millpond.dev/role": "both"},
    },
    "spec": {"containers": [{"name": "engine", "ports": [{"name": "http", "containerPort": 8000}]}]},
    "status": {"podIP": "10.0.0.1", "phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
}


def change(path: str, value: Any) -> dict[str, Any]:
    """The pod with one place changed; None removes it."""
    pod = copy.deepcopy(POD)
    *parents, last = path.split("/")
    place: Any = pod
    for parent in parents:
        place = place[int(parent) if isinstance(place, list) else parent]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return pod


def test_a_ready_pod_is_a_replica_by_uid() -> None:
    replica = parse_replica(POD)
    assert replica is not None
    assert (replica.uid, replica.address, replica.revision, replica.role) == (
        "u-1",
        "10.0.0.1:8000",
        "r1",
        Role.BOTH,
    )
    assert replica.ready
    assert not replica.cordoned


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("status/podIP", None),
        ("status/podIP", ""),
        ("metadata/labels", {}),
        ("status/phase", "Failed"),
        ("status/phase", "Succeeded"),
    ],
)
def test_gw_022_gw_025_a_pod_without_address_label_or_life_is_no_replica(path: str, value: Any) -> None:
    assert parse_replica(change(path, value)) is None


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("status/conditions", []),
        ("status/conditions/0/status", "False"),
        ("status/conditions/0/status", "Unknown"),
    ],
)
def test_gw_024_gw_025_a_pod_that_is_not_ready_is_no_candidate(path: str, value: Any) -> None:
    replica = parse_replica(change(path, value))
    assert replica is not None
    assert not replica.ready


@pytest.mark.parametrize(
    ("path", "value", "cordoned"),
    [
        ("metadata/labels/cordoned", "true", True),
        ("metadata/labels/cordoned", "false", False),
        ("metadata/deletionTimestamp", "2026-01-01T00:00:00Z", True),
    ],
)
def test_gw_023_gw_045_a_marked_or_deleted_pod_is_cordoned_and_kept(
    path: str, value: Any, cordoned: bool
) -> None:
    pod = change("status/phase", "Running")
    if "labels" in path:
        pod["metadata"]["labels"]["millpond.dev/cordoned"] = value
    else:
        pod = change(path, value)
    replica = parse_replica(pod)
    assert replica is not None
    assert replica.cordoned is cordoned


def test_an_ipv6_address_and_another_port() -> None:
    pod = change("status/podIP", "fd00::1")
    pod["spec"]["containers"][0]["ports"][0]["containerPort"] = 9000
    replica = parse_replica(pod)
    assert replica is not None
    assert replica.address == "[fd00::1]:9000"


def make_pool(**spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "chat"}, "spec": {"model": {"source": "hf://org/model"}, **spec}}


def test_the_smallest_pool_has_defaults() -> None:
    pool = parse_pool(make_pool())
    assert pool is not None
    assert (pool.name, pool.model, pool.root, pool.policy) == ("chat", "chat", "org/model", Policy.AUTO)
    assert pool.cold_start_hold_seconds == 0


def test_every_setting_of_a_pool_is_read() -> None:
    pool = parse_pool(
        make_pool(
            model={
                "name": "m",
                "source": "hf://o/r/file.gguf",
                "adapters": [{"name": "sql", "source": "hf://x/y"}],
            },
            engine={"maxModelTokens": 4096, "kvCache": {"blockTokens": 32}},
            gateway={"routing": "LeastLoaded", "priceOfRecompute": 7},
            scaling={"minReplicas": 0, "maxReplicas": 3, "coldStartHoldSeconds": 120},
            scheduling={
                "classes": [
                    {"name": "interactive", "priority": 100, "ttftMilliseconds": 700},
                    {"name": "batch", "admitWhileQueued": {"class": "interactive", "below": 4}},
                ],
                "defaultClass": "interactive",
                "tenants": [
                    {
                        "name": "acme",
                        "weight": 3,
                        "maxConcurrency": 64,
                        "apiKeySecretRef": {"name": "acme-keys"},
                    }
                ],
                "pricing": {"inputPerMillion": "0.20", "outputPerMillion": "0.80", "currency": "USD"},
            },
        )
    )
    assert pool is not None
    assert (pool.model, pool.root, pool.adapters, pool.block_tokens) == ("m", "o/r", ("sql",), 32)
    assert (pool.policy, pool.price_of_recompute, pool.max_model_tokens) == (Policy.LEAST_LOADED, 7.0, 4096)
    assert pool.cold_start_hold_seconds == 120
    assert (pool.classes[0].ttft_seconds, pool.classes[1].gate_class, pool.classes[1].gate_below) == (
        0.7,
        "interactive",
        4,
    )
    assert (pool.tenants[0].max_concurrency, pool.tenants[0].key_secret) == (64, "acme-keys")
    assert pool.pricing is not None
    assert pool.pricing.output_per_million == 0.8
    assert pool.pricing.cached_input_per_million == 0.2, "absent, it is the price of computed tokens"


def test_a_pool_whose_gateway_is_off_is_none_here() -> None:
    assert parse_pool(make_pool(gateway={"enabled": False})) is None


def test_as_021_the_default_hold_follows_the_measured_start() -> None:
    obj = make_pool(replicas=0)
    obj["status"] = {"scaling": {"startSeconds": 1200}}
    pool = parse_pool(obj)
    assert pool is not None
    assert (pool.start_seconds, pool.cold_start_hold_seconds, pool.may_be_zero) == (1200.0, 1800.0, False)
    scaled = make_pool(scaling={"minReplicas": 0, "maxReplicas": 2, "coldStartHoldSeconds": 60})
    pool = parse_pool(scaled | {"status": obj["status"]})
    assert pool is not None
    assert (pool.start_seconds, pool.cold_start_hold_seconds, pool.may_be_zero) == (1200.0, 60.0, True)


def test_a_pool_somebody_scaled_to_zero_holds() -> None:
    pool = parse_pool(make_pool(replicas=0))
    assert pool is not None
    assert pool.cold_start_hold_seconds == 300
