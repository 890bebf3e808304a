"""The release itself comes, restarts and goes while pools serve."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
from tests.e2e.conftest import Fleet
from tests.e2e.test_under_load import assert_whole, stream_during
from tests.support.kube import wait_for

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
            "--timeout=120s",
            what="waiting for the operator",
            seconds=150,
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

    wait_for("the pool's objects to go", lambda: not list_left(), seconds=120)


def _is_ours(item: dict[str, dict[str, dict[str, str]]]) -> bool:
    # The chart's own binding of the operator in this namespace stays until helm uninstall.
    return item["metadata"].get("labels", {}).get("app.kubernetes.io/managed-by") == "millpond-operator"


def _list_pods(fleet: Fleet) -> set[str]:
    output = fleet.site.run_kubectl(
        "get", "pods", "-l", "app.kubernetes.io/component=engine", "-o", "name", what="listing pods"
    )
    return set(output.split())
