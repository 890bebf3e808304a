"""Children that exist once, and the shared gateway."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.support.operator_builders import BUILD, make_pool

from millpond_common.contract import labels, ports
from millpond_operator.api.spec import EnvVar
from millpond_operator.desired.children import make_children
from millpond_operator.desired.gateway import make_endpoint, make_gateway
from millpond_operator.desired.manifest import Manifest, Owner


def by_kind(manifests: list[Manifest]) -> dict[str, Any]:
    return {manifest.kind.name: manifest.body for manifest in manifests}


def test_every_child_is_controlled_by_the_pool_and_labelled_for_the_watch() -> None:
    for manifest in make_children(make_pool(), BUILD):
        metadata = manifest.body["metadata"]
        assert metadata["labels"][labels.MANAGED_BY] == labels.MANAGER
        assert metadata["labels"][labels.POOL] == "smol"
        assert [owner["controller"] for owner in metadata["ownerReferences"]] == [True]
        assert metadata["annotations"][labels.APPLIED_DIGEST] == manifest.digest


def test_the_network_policy_lets_in_gateways_and_the_operator_only() -> None:
    policy = by_kind(make_children(make_pool(), BUILD))["NetworkPolicy"]["spec"]
    ports_of = [sorted(port["port"] for port in rule["ports"]) for rule in policy["ingress"]]
    assert ports_of == [
        sorted([ports.ENGINE_HTTP, ports.ENGINE_KV_EVENTS, ports.ENGINE_KV_REPLAY]),
        [ports.ENGINE_HTTP, ports.ENGINE_ADMIN],
    ]
    assert all(rule["from"] for rule in policy["ingress"]), "an empty peer list would let everybody in"


def test_without_gateway_the_namespace_may_reach_the_engines() -> None:
    policy = by_kind(make_children(make_pool(gateway={"enabled": False}), BUILD))["NetworkPolicy"]["spec"]
    assert {"podSelector": {}} in policy["ingress"][-1]["from"]


@pytest.mark.parametrize(
    ("cache", "made"),
    [
        ({"type": "None"}, False),
        ({"type": "Claim", "claimName": "mine"}, False),
        ({"type": "Claim", "sizeLimit": "100Gi"}, True),
    ],
)
def test_a_claim_is_made_only_when_none_is_named(cache: dict[str, Any], made: bool) -> None:
    pool = make_pool(model={"source": "hf://o/r", "cache": cache})
    assert ("PersistentVolumeClaim" in by_kind(make_children(pool, BUILD))) == made


def test_the_gateway_belongs_to_its_pools_and_is_controlled_by_none() -> None:
    owners = [Owner("ns", "a", "uid-a"), Owner("ns", "b", "uid-b")]
    for manifest in make_gateway(owners, BUILD):
        references = manifest.body["metadata"]["ownerReferences"]
        assert [(reference["uid"], "controller" in reference) for reference in references] == [
            ("uid-a", False),
            ("uid-b", False),
        ]


def test_the_gateway_binds_the_one_role_of_the_installation() -> None:
    build = dataclasses.replace(BUILD, gateway_role_kind="Role", gateway_role_name="release-gateway")
    binding = by_kind(make_gateway([Owner("ns", "a", "uid-a")], build))["RoleBinding"]
    assert binding["roleRef"] == {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "Role",
        "name": "release-gateway",
    }
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "millpond-gateway", "namespace": "ns"}]


def test_gateways_get_the_installation_s_environment_beside_their_own() -> None:
    build = dataclasses.replace(BUILD, gateway_env=(EnvVar(name="OTEL_SERVICE_NAME", value="mill"),))
    deployment = by_kind(make_gateway([Owner("ns", "a", "uid-a")], build))["Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["env"][-1] == {"name": "OTEL_SERVICE_NAME", "value": "mill"}
    assert [found["name"] for found in container["env"][:-1]] == ["POD_NAME", "POD_NAMESPACE", "POD_IP"]


@pytest.mark.parametrize(("grace", "streams"), [(330, 300), (900, 870), (20, 1)])
def test_a_leaving_gateway_ends_its_streams_before_the_kubelet_ends_it(grace: int, streams: int) -> None:
    build = dataclasses.replace(BUILD, gateway_grace_seconds=grace, gateway_args=("--no-access-log",))
    spec = by_kind(make_gateway([Owner("ns", "a", "uid-a")], build))["Deployment"]["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] == grace
    (container,) = spec["containers"]
    assert container["args"] == [f"--grace-seconds={streams}", "--no-access-log"], "what is given last wins"


def test_the_endpoint_is_the_gateways_service() -> None:
    assert make_endpoint("ns", BUILD) == "http://millpond-gateway.ns.svc.cluster.local/v1"


def test_network_policies_can_be_left_out() -> None:
    build = dataclasses.replace(BUILD, network_policies=False)
    assert "NetworkPolicy" not in by_kind(make_children(make_pool(), build))
    assert "NetworkPolicy" not in by_kind(make_gateway([Owner("ns", "a", "uid-a")], build))
