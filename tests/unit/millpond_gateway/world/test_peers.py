from __future__ import annotations

from typing import Any

import pytest

from millpond_gateway.world.kubernetes import PeerStore
from millpond_gateway.world.parse import parse_peer, parse_pool, parse_weights
from millpond_gateway.world.records import Peer


def make_pod(name: str, ip: str | None, *args: str, ready: bool = True, **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", **metadata},
        "spec": {"containers": [{"name": "gateway", "args": list(args)}]},
        "status": {"podIP": ip, "conditions": [{"type": "Ready", "status": str(ready)}]},
    }


@pytest.mark.parametrize(
    ("args", "ports"),
    [
        ((), [8082]),
        (("--workers", "3"), [8082, 8083, 8084]),
        (("--no-access-log", "--workers=2"), [8082, 8083]),
        (("--workers",), [8082]),
        (("--workers", "many"), [8082]),
        (("--workers", "99"), list(range(8082, 8098))),
    ],
)
def test_every_worker_of_another_gateway_is_a_peer(args: tuple[str, ...], ports: list[int]) -> None:
    peer = parse_peer(make_pod("b", "10.0.0.2", *args))
    assert peer == Peer("10.0.0.2", tuple(f"10.0.0.2:{port}" for port in ports))


def test_a_gateway_that_is_not_ready_is_heard_and_not_told() -> None:
    assert parse_peer(make_pod("b", "10.0.0.2", ready=False)) == Peer("10.0.0.2", ())
    assert parse_peer(make_pod("b", "10.0.0.2", deletionTimestamp="x")) == Peer("10.0.0.2", ())
    assert parse_peer(make_pod("b", None)) is None
    assert parse_peer(make_pod("b", "fd00::2")) == Peer("fd00::2", ("[fd00::2]:8082",))


def test_the_store_tells_addresses_and_hosts_of_the_others() -> None:
    told: list[frozenset[str]] = []
    hosts: list[frozenset[str]] = []
    store = PeerStore("a", told.append, hosts.append)
    store.replace([make_pod("a", "10.0.0.1"), make_pod("b", "10.0.0.2")])
    store.put(make_pod("c", "10.0.0.3", ready=False))
    assert told[-1] == {"10.0.0.2:8082"}
    assert hosts[-1] == {"10.0.0.2", "10.0.0.3"}
    store.remove(make_pod("b", "10.0.0.2"))
    assert (told[-1], hosts[-1]) == (frozenset(), {"10.0.0.3"})


def make_pool(annotation: str) -> dict[str, Any]:
    annotations = {"millpond.dev/revision-weights": annotation}
    return {"metadata": {"name": "p", "annotations": annotations}, "spec": {"model": {"source": "hf://a/b"}}}


def test_weights_come_from_the_pools_annotation_and_a_wrong_one_costs_only_itself() -> None:
    pool = parse_pool(make_pool("blue=90, green=10"))
    assert pool is not None
    assert pool.revision_weights == {"blue": 90.0, "green": 10.0}
    wrong = parse_pool(make_pool("blue=lots"))
    assert wrong is not None
    assert wrong.revision_weights == {}
    assert "blue=lots" in wrong.warnings[0]


@pytest.mark.parametrize("text", ["blue", "=5", "blue=-1", "blue=nan", "blue=inf"])
def test_weights_are_numbers_from_zero_on(text: str) -> None:
    with pytest.raises(ValueError, match="REVISION=WEIGHT"):
        parse_weights(text)
