"""A namespace whose quota has room for what runs and not for one replica more."""

from __future__ import annotations

import pytest
from tests.support.kube import wait_for
from tests.support.operator_world import World

from millpond_common.contract import labels

pytestmark = pytest.mark.cluster


def test_op_018_a_rollout_gets_past_a_full_quota(own_world: World) -> None:
    """A surge replica is refused by the API server, so it never becomes a pod that could be seen to be stuck."""
    world = own_world
    world.start_operator()
    world.create("narrow", replicas=1)
    old = world.wait_ready("narrow")["status"]["revision"]
    num_pods = len(world.kube.list("v1", "Pod"))
    quota = {"hard": {"pods": str(num_pods)}}
    world.kube.create(
        {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "team"}, "spec": quota}
    )
    wait_for(
        "the quota counts",
        lambda: (
            world.kube.get("v1", "ResourceQuota", "team").get("status", {}).get("used", {}).get("pods")
            == str(num_pods)
        ),
    )
    world.patch("narrow", {"spec": {"engine": {"maxModelTokens": 4096}}})
    condition = world.wait_reason("narrow", "WaitingForCapacity", kind="Progressing")
    assert "exceeded quota: team" in condition["message"]
    status = world.wait_ready("narrow")["status"]
    assert status["revision"] != old
    pods = world.list_pods("narrow", leaving=True)
    assert [pod["metadata"]["labels"][labels.REVISION] for pod in pods] == [status["revision"]]
