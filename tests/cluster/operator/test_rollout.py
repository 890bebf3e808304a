"""Rollouts and scale-downs on the real control plane: controllers choose pods, the operator chooses counts."""

from __future__ import annotations

import math
import time
from datetime import datetime, timedelta
from typing import Any

import pytest
from tests.support.kube import wait_for
from tests.support.kubelet import Behaviour
from tests.support.operator_world import World

from millpond_common.contract import labels
from millpond_common.contract.gateway_report import RevisionReport
from millpond_operator.observe.observer import MOVING_REPORT_SECONDS

pytestmark = pytest.mark.cluster


def get_revision(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["labels"][labels.REVISION])


def test_op_023_the_old_replica_stays_until_the_gateway_routes_to_the_new(world: World) -> None:
    world.create("handover", replicas=1)
    old = world.wait_ready("handover")["status"]["revision"]
    (pod,) = world.list_pods("handover")
    world.gateway.hide_new = True
    try:
        world.patch("handover", {"spec": {"engine": {"maxModelTokens": 4096}}})
        wait_new_revision(world, "handover", old)
        world.look("handover", times=3)
        world.operator.resync()
        world.look("handover")
        assert pod["metadata"]["name"] in {p["metadata"]["name"] for p in world.list_pods("handover")}
        assert world.get_condition("handover")["reason"] == "RollingOut"
        assert len([p for p in world.list_pods("handover") if get_revision(p) != old]) == 1
    finally:
        world.gateway.hide_new = False
    status = world.wait_ready("handover")["status"]
    assert status["revision"] != old
    world.wait_pods(
        "handover",
        "none of the old revision",
        lambda pods: {get_revision(p) for p in pods} == {status["revision"]},
        leaving=True,
    )
    wait_for("one Deployment is left", lambda: len(world.list_workloads("handover")) == 1)


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def test_op_021_a_good_image_gets_past_a_bad_one(world: World) -> None:
    def behave(pod: dict[str, Any]) -> Behaviour:
        bad = pod["spec"]["containers"][0]["image"] == "engine:bad"
        return Behaviour(ready_after_seconds=None if bad else 0.0)

    world.behaviours["mended"] = behave
    world.create("mended", replicas=2, engine={"image": "engine:bad"})
    world.wait_reason("mended", "ReplicasNotReady")
    world.patch("mended", {"spec": {"engine": {"image": "engine:good"}}})
    world.wait_ready("mended")
    assert {p["spec"]["containers"][0]["image"] for p in world.list_pods("mended")} == {"engine:good"}


def test_a_bad_image_leaves_the_good_replicas_serving(world: World) -> None:
    def behave(pod: dict[str, Any]) -> Behaviour:
        bad = pod["spec"]["containers"][0]["image"] == "engine:bad"
        crash = {"exitCode": 1, "reason": "Error", "message": "ImportError: no module named x"}
        return Behaviour(ready_after_seconds=None, terminated=crash, restarts=3) if bad else Behaviour()

    world.behaviours["kept"] = behave
    world.create("kept", replicas=2, engine={"image": "engine:good"})
    world.wait_ready("kept")
    world.patch("kept", {"spec": {"engine": {"image": "engine:bad"}}})
    condition = world.wait_reason("kept", "CrashLoop")
    assert "ImportError" in condition["message"]
    good = [p for p in world.list_pods("kept") if p["spec"]["containers"][0]["image"] == "engine:good"]
    assert len(good) == 2
    assert world.get("kept")["status"]["readyReplicas"] == 2
    world.patch("kept", {"spec": {"engine": {"image": "engine:good"}}})
    world.wait_ready("kept")
    assert {p["metadata"]["uid"] for p in world.list_pods("kept")} == {p["metadata"]["uid"] for p in good}, (
        "nothing restarted"
    )


def test_op_032_the_spec_of_the_revision_before_can_be_read_back(world: World) -> None:
    import json

    world.create("history", replicas=1, engine={"maxModelTokens": 2048})
    first = world.wait_ready("history")["status"]["revision"]
    world.patch("history", {"spec": {"engine": {"maxModelTokens": 4096}}})
    assert world.wait_ready("history")["status"]["revision"] != first
    record = world.kube.get("v1", "ConfigMap", f"history-{first}")
    world.patch("history", json.loads(record["data"]["spec.json"]))
    assert world.wait_ready("history")["status"]["revision"] == first


def test_a_scale_down_cordons_the_least_valuable_replica_first(world: World) -> None:
    world.create("victims", replicas=3)
    world.wait_ready("victims")
    names = sorted(pod["metadata"]["name"] for pod in world.list_pods("victims"))
    victim = names[-1]  # without any value the first name would leave
    for value, name in enumerate(reversed(names)):
        world.gateway.unique_cached_tokens[name] = 1000 * (value + 1)
    world.behaviours["victims"] = lambda _pod: Behaviour(drain_seconds=math.inf)
    world.gateway.open_requests[victim] = 5
    time.sleep(MOVING_REPORT_SECONDS + 0.1)  # an older report says nothing of these values
    world.patch("victims", {"spec": {"replicas": 2}})
    leaving = wait_for(
        "one replica leaves",
        lambda: [
            p for p in world.list_pods("victims", leaving=True) if p["metadata"].get("deletionTimestamp")
        ],
    )
    assert [pod["metadata"]["name"] for pod in leaving] == [victim]
    assert leaving[0]["metadata"]["labels"][labels.CORDONED] == "true"

    def names_it(status: dict[str, Any]) -> bool:
        draining = status.get("draining") or []
        return [(entry["replica"], entry.get("numRequests")) for entry in draining] == [(victim, 5)]

    world.wait_status("victims", "names it with what is left", names_it)
    world.behaviours["victims"] = lambda _pod: Behaviour()
    status = world.wait_ready("victims")["status"]
    assert status["readyReplicas"] == 2


def test_an_edited_template_of_a_child_is_put_back(world: World) -> None:
    world.create("templated", replicas=1)
    world.wait_ready("templated")
    (deployment,) = world.list_workloads("templated")
    image = {"spec": {"template": {"spec": {"containers": [{"name": "engine", "image": "intruder:1"}]}}}}
    world.kube.resource("apps/v1", "Deployment").patch(
        name=deployment["metadata"]["name"], namespace=world.namespace, body=image,
        content_type="application/strategic-merge-patch+json",
    )  # fmt: skip

    def is_back() -> bool:
        (live,) = world.list_workloads("templated")
        return bool(live["spec"]["template"]["spec"]["containers"][0]["image"] == "millpond-engine:test")

    wait_for("the image is put back", is_back)
    world.wait_ready("templated")


GATE = {"ttftMilliseconds": 700, "bakeSeconds": 4}


def tell(world: World, pool: str, revision: str, ttft_milliseconds: int) -> None:
    """The gateways counted 50 requests of a revision from now on."""
    counted = RevisionReport(revision, 50, 0, ((ttft_milliseconds, 50),))
    world.gateway.demand[pool] = {"revisions": (counted,)}


def wait_new_revision(world: World, pool: str, old: str) -> str:
    """Wait for a ready replica of another revision; its name."""
    found = wait_for(
        "a new replica is ready",
        lambda: [get_revision(p) for p in world.list_pods(pool) if get_revision(p) != old and is_ready(p)],
    )
    return str(found[0])


def test_op_034_a_revision_above_its_gate_is_halted_and_rolled_back(own_world: World) -> None:
    world = own_world
    first = world.start_operator()
    world.create("gated", replicas=2, rollout={"gate": GATE})
    good = world.wait_ready("gated")["status"]["revision"]
    kept = {pod["metadata"]["uid"] for pod in world.list_pods("gated")}
    world.patch("gated", {"spec": {"engine": {"maxModelTokens": 4096}}})
    world.wait_reason("gated", "Baking", kind="Progressing")
    tell(world, "gated", wait_new_revision(world, "gated", good), 1500)
    condition = world.wait_reason("gated", "RolledBack")
    assert "1500 ms in 50 requests, the gate allows 700 ms" in condition["message"]
    pods = world.wait_pods(
        "gated",
        "only the old revision",
        lambda pods: {get_revision(p) for p in pods} == {good},
        leaving=True,
    )
    assert {pod["metadata"]["uid"] for pod in pods} == kept, "nothing good was restarted"
    world.wait_status(
        "gated",
        "counts the two that stayed",
        lambda status: (status["revision"], status["readyReplicas"]) == (good, 2),
    )
    assert world.wait_event("gated", "RolledBack")["type"] == "Warning"
    first.stop()
    second = world.start_operator()
    wait_for("the next operator leads", lambda: second.operator and second.operator.lease.is_leader)
    second.look("gated", times=3)
    second.resync()
    second.look("gated")
    assert {get_revision(p) for p in world.list_pods("gated", leaving=True)} == {good}
    assert world.get_condition("gated")["reason"] == "RolledBack"
    world.gateway.demand["gated"] = {}
    world.patch("gated", {"spec": {"engine": None}})
    assert world.wait_ready("gated")["status"]["revision"] == good


def test_op_034_a_revision_within_its_gate_replaces_the_old_one_after_the_bake(world: World) -> None:
    world.create("baked", replicas=2, rollout={"gate": GATE})
    old = world.wait_ready("baked")["status"]["revision"]
    world.patch("baked", {"spec": {"engine": {"maxModelTokens": 4096}}})
    world.behaviours["baked"] = lambda _pod: Behaviour(drain_seconds=math.inf)
    new = wait_new_revision(world, "baked", old)
    tell(world, "baked", new, 300)

    def left_at(pod: dict[str, Any]) -> datetime | None:
        asked = pod["metadata"].get("deletionTimestamp")
        grace = timedelta(seconds=pod["metadata"].get("deletionGracePeriodSeconds", 0))
        return datetime.fromisoformat(asked) - grace if asked else None

    pods = world.wait_pods("baked", "one leaves", lambda pods: any(map(left_at, pods)), leaving=True)
    leaving = [at for pod in pods if (at := left_at(pod)) is not None]
    proven = [ready_since(pod) for pod in pods if get_revision(pod) == new and is_ready(pod)]
    assert (min(leaving) - min(proven)).total_seconds() >= GATE["bakeSeconds"]
    world.behaviours["baked"] = lambda _pod: Behaviour()
    assert world.wait_ready("baked")["status"]["revision"] == new


def ready_since(pod: dict[str, Any]) -> datetime:
    (stamp,) = [c["lastTransitionTime"] for c in pod["status"]["conditions"] if c["type"] == "Ready"]
    return datetime.fromisoformat(stamp)
