"""The release itself comes, restarts and goes while pools serve."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from tests.e2e.conftest import Fleet
from tests.e2e.test_under_load import assert_whole, stream_during
from tests.support.kube import wait_for

from demo.errors import DemoError
from demo.install import Site
from millpond_common.contract import labels, ports

pytestmark = [pytest.mark.node, pytest.mark.timeout(600)]
KINDS = "deployments,replicasets,pods,services,configmaps,serviceaccounts,poddisruptionbudgets,networkpolicies,rolebindings"


def test_an_operator_restart_under_load_changes_nothing(fleet: Fleet, gateway_url: Callable[[], str]) -> None:
    site = fleet.site
    site.apply(fleet.make_fake_pool("steady", replicas=1))
    before = site.wait_ready("steady")
    pods = _list_pods(fleet)
    url = gateway_url()

    def restart() -> None:
        kubectl = site.cluster.run_kubectl
        where = ("-n", site.system_namespace)
        kubectl(*where, "rollout", "restart", "deployment", what="restarting the operator")
        kubectl(
            *where,
            "rollout",
            "status",
            "deployment",
            "--timeout=180s",
            what="waiting for the operator",
            seconds=200,
        )
        site.apply(fleet.make_fake_pool("steady", replicas=2))
        site.wait_ready("steady")

    tally = asyncio.run(stream_during(url, "steady", restart, at_least=100))
    assert_whole(tally)
    after = site.fetch_pool("steady")
    assert after["status"]["revision"] == before["status"]["revision"]
    assert pods <= _list_pods(fleet), "the restart replaced a replica"


def test_the_last_pool_takes_everything_with_it(fleet: Fleet) -> None:
    site = fleet.site
    site.apply(fleet.make_fake_pool("gone", replicas=1))
    site.wait_ready("gone")
    site.remove_pools()

    def list_left() -> list[str]:
        found = json.loads(site.run_kubectl("get", KINDS, "-o", "json", what="listing what is left"))
        return [f"{item['kind']}/{item['metadata']['name']}" for item in found["items"] if _is_ours(item)]

    wait_for("the pool's objects to go", lambda: not list_left(), seen=list_left)


def test_a_chart_upgrade_under_load_replaces_gateways_and_no_replica(fleet: Fleet) -> None:
    site = fleet.site
    site.apply(fleet.make_fake_pool("kept", replicas=2))
    before = site.wait_ready("kept")
    pods, gateways = _list_pods(fleet), _list_pods(fleet, "gateway")
    # A forwarded port leads to one pod, which the upgrade replaces; a node's port leads to whichever is ready.
    site.apply(make_node_port(site.namespace))
    url = find_node_port(site)

    def upgrade() -> None:
        fleet.install("gateway.memory=300Mi", "operator.podAnnotations.upgraded=yes")
        wait_for("new gateways", lambda: not gateways & _list_pods(fleet, "gateway"), seconds=180)
        site.wait_ready("kept")

    tally = asyncio.run(stream_during(url, "kept", upgrade, at_least=200))
    assert_whole(tally)
    assert _list_pods(fleet) == pods, "the upgrade replaced a replica"
    assert site.fetch_pool("kept")["status"]["revision"] == before["status"]["revision"]


@pytest.mark.slow  # the test of the last pool and tests/chart/test_lifecycle.py show its halves
def test_an_uninstall_leaves_nothing(fleet: Fleet) -> None:
    site = fleet.site
    site.apply(fleet.make_fake_pool("last", replicas=1))
    site.wait_ready("last")
    site.remove_pools()
    site.uninstall_chart()
    try:
        left: list[list[str]] = [[]]

        def is_gone() -> bool:
            left[0] = _list_everything(fleet)
            return left[0] == []

        wait_for("nothing to be left", is_gone, seen=lambda: left[0])
    finally:
        fleet.install()  # the other tests share it


def make_node_port(namespace: str) -> dict[str, Any]:
    """A Service of the gateways on a port of the node."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "from-outside", "namespace": namespace},
        "spec": {
            "type": "NodePort",
            "selector": {labels.COMPONENT: "gateway"},
            "ports": [{"name": "http", "port": 80, "targetPort": ports.GATEWAY_HTTP}],
        },
    }


def find_node_port(site: Site) -> str:
    """Base URL of that Service."""
    read = site.cluster.fetch_json
    service = read("-n", site.namespace, "get", "service", "from-outside", what="reading the service")
    nodes: Any = read("get", "nodes", what="reading the node")["items"]
    # Nodes that other suites pretend to have no address.
    addresses = [entry for node in nodes for entry in node["status"].get("addresses", ())]
    address = next(entry["address"] for entry in addresses if entry["type"] == "InternalIP")
    url = f"http://{address}:{service['spec']['ports'][0]['nodePort']}"
    wait_for("the node's port to lead to a gateway", lambda: _answers(url))
    return url


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def _list_everything(fleet: Fleet) -> list[str]:
    """Objects of every kind that the release or its operator made, in its namespaces and outside of any."""
    site = fleet.site
    kubectl = site.cluster.run_kubectl
    kinds = kubectl("api-resources", "--verbs=list,delete", "-o", "name", what="listing kinds").split()
    # Pools and their CRD stay on purpose; events expire; a warning that `endpoints` is deprecated would spoil the JSON.
    skipped = ("events", "endpoints", "customresourcedefinitions")
    kinds = [
        kind for kind in kinds if kind == "endpointslices.discovery.k8s.io" or not kind.startswith(skipped)
    ]
    try:
        found = kubectl("get", ",".join(kinds), "-A", "-o", "json", what="listing everything")
    except DemoError as error:  # a kind that another user of the cluster took away meanwhile
        return [str(error)]
    return [
        f"{item['kind']} {item['metadata']['name']}"
        for item in json.loads(found)["items"]
        if _is_of(item, site)
    ]


def _is_of(item: dict[str, Any], site: Site) -> bool:
    metadata = item["metadata"]
    namespace = metadata.get("namespace")
    if namespace == site.system_namespace:
        return bool(metadata["name"] not in ("default", "kube-root-ca.crt"))  # every namespace has these two
    if namespace == site.namespace and _is_ours(item):
        return True
    return bool(
        metadata.get("annotations", {}).get("meta.helm.sh/release-namespace") == site.system_namespace
    )


def _is_ours(item: dict[str, Any]) -> bool:
    # The chart's own binding of the operator in this namespace stays until helm uninstall.
    return bool(item["metadata"].get("labels", {}).get(labels.MANAGED_BY) == labels.MANAGER)


def _list_pods(fleet: Fleet, component: str = "engine") -> set[str]:
    output = fleet.site.run_kubectl(
        "get", "pods", "-l", f"{labels.COMPONENT}={component}", "-o", "name", what="listing pods"
    )
    return set(output.split())
