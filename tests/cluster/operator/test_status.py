"""Status that never claims more than is true, and names what is wrong."""

from __future__ import annotations

import re
import subprocess

import pytest
from tests.fixtures.cluster import Cluster
from tests.support.kube import wait_for
from tests.support.kubelet import Behaviour
from tests.support.operator_world import World, find_condition

from millpond_operator.observe import references

pytestmark = pytest.mark.cluster


def test_op_004_a_missing_secret_is_named_and_the_pool_goes_on_by_itself(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(references, "KEEP_SECONDS", 1.0)
    model = {"source": "hf://owner/repo", "secretRef": {"name": "hf-token"}}
    world.create("secretive", replicas=1, model=model)
    condition = world.wait_reason("secretive", "SecretNotFound")
    assert "hf-token" in condition["message"]
    world.kube.create(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "hf-token"},
            "stringData": {"HF_TOKEN": "x"},
        }
    )
    world.wait_ready("secretive")


def test_op_042_a_misspelt_source_is_named_from_the_container(world: World) -> None:
    told = '{"reason": "ModelFetchFailed", "message": "hf://owner/misspelt: the hub answers 404"}'
    failed = Behaviour(init_terminated={"exitCode": 1, "reason": "Error", "message": told}, restarts=2)
    world.behaviours["misspelt"] = lambda _pod: failed
    world.create("misspelt", replicas=1, model={"source": "hf://owner/misspelt"})
    condition = world.wait_reason("misspelt", "ModelFetchFailed")
    assert condition["status"] == "False"
    assert "hf://owner/misspelt: the hub answers 404" in condition["message"]
    assert world.get_condition("misspelt", "ModelAvailable")["reason"] == "ModelFetchFailed"
    event = world.wait_event("misspelt", "ModelFetchFailed")
    assert event["type"] == "Warning"


def test_op_043_ready_turns_false_when_a_replica_breaks_later(world: World) -> None:
    broken: list[bool] = []

    def behave(_pod: object) -> Behaviour:
        if not broken:
            return Behaviour()
        return Behaviour(
            ready_after_seconds=None,
            waiting={"reason": "CrashLoopBackOff", "message": "back-off"},
            terminated={
                "exitCode": 1,
                "reason": "Error",
                "message": "RuntimeError: CUDA error: out of memory",
            },
            restarts=5,
        )

    world.behaviours["breaks"] = behave
    world.create("breaks", replicas=1)
    world.wait_ready("breaks")
    broken.append(True)
    condition = world.wait_reason("breaks", "CrashLoop")
    assert condition["status"] == "False"
    assert "CUDA error: out of memory" in condition["message"]


def test_op_046_no_room_is_said_with_what_is_asked(world: World) -> None:
    world.behaviours["roomless"] = lambda _pod: Behaviour(schedules=False)
    world.create("roomless", replicas=1, resources={"limits": {"nvidia.com/gpu": 1, "cpu": "1"}})
    condition = world.wait_reason("roomless", "Unschedulable")
    assert "nvidia.com/gpu 1" in condition["message"]
    assert condition["status"] == "False"


def test_op_024_ready_at_a_generation_means_that_generation_runs(world: World) -> None:
    world.create("waits", replicas=1)
    world.wait_ready("waits")
    generation = world.patch("waits", {"spec": {"engine": {"maxModelTokens": 4096}}})["metadata"][
        "generation"
    ]
    pool = world.wait_ready("waits")
    assert pool["metadata"]["generation"] == generation
    assert pool["status"]["updatedReplicas"] == pool["status"]["desiredReplicas"]
    revisions = {p["metadata"]["labels"]["millpond.dev/revision"] for p in world.list_pods("waits")}
    assert revisions == {pool["status"]["revision"]}


def test_a_replica_that_cannot_answer_keeps_the_pool_unready(world: World) -> None:
    world.gateway.probe_failure = "HTTP 500: no token came"
    try:
        world.create("mute", replicas=1)
        condition = world.wait_reason("mute", "ProbeFailed")
        assert "no token came" in condition["message"]
    finally:
        world.gateway.probe_failure = None
    world.wait_ready("mute")


def test_op_044_a_pool_that_loses_its_replicas_says_so(world: World) -> None:
    gone: list[bool] = []
    world.behaviours["drained"] = lambda _pod: Behaviour(schedules=not gone)
    world.create("drained", replicas=2)
    world.wait_ready("drained")
    gone.append(True)
    for pod in world.list_pods("drained"):
        world.kube.delete("v1", "Pod", pod["metadata"]["name"])
    world.wait_pool(
        "drained",
        "no replica is counted, Ready or said to hold the model",
        lambda pool: (
            pool["status"]["readyReplicas"] == 0
            and find_condition(pool)["status"] == "False"
            and find_condition(pool, "ModelAvailable")["status"] != "True"
        ),
    )


def test_op_113_one_cause_is_one_event(world: World) -> None:
    crash = Behaviour(
        ready_after_seconds=None,
        terminated={"exitCode": 3, "reason": "Error", "message": "boom error"},
        restarts=1,
    )
    world.behaviours["boom"] = lambda _pod: crash
    world.create("boom", replicas=1)
    world.wait_event("boom", "CrashLoop")
    for _ in range(30):
        world.operator.mark("boom")
    world.look("boom", times=2)
    world.operator.resync()
    world.look("boom")
    assert len(world.list_events("boom", "CrashLoop")) == 1


def test_a_paused_pool_is_left_alone_and_goes_on(world: World) -> None:
    world.create("paused", replicas=1)
    world.wait_ready("paused")
    world.patch(
        "paused", {"metadata": {"annotations": {"millpond.dev/paused": "true"}}, "spec": {"replicas": 2}}
    )
    world.wait_reason("paused", "Paused", kind="Progressing")
    world.look("paused", times=2)
    assert world.list_workloads("paused")[0]["spec"]["replicas"] == 1
    world.patch("paused", {"metadata": {"annotations": {"millpond.dev/paused": None}}})
    world.wait_ready("paused")
    assert world.list_workloads("paused")[0]["spec"]["replicas"] == 2


WIDE = """
NAME         MODEL   DESIRED   READY   STATUS   ENDPOINT                                                   AGE   REASON
wide-bad     bad     1         0       False    http://millpond-gateway.NAMESPACE.svc.cluster.local/v1   0s    CrashLoop
wide-good    good    2         2       True     http://millpond-gateway.NAMESPACE.svc.cluster.local/v1   0s    Answering
"""


def show_pools(world: World, crds: Cluster, *names: str) -> str:
    """What `kubectl get mpool -o wide` prints."""
    command = [crds.kubectl, "--kubeconfig", world.kubeconfig, "--namespace", world.namespace]
    done = subprocess.run(
        [*command, "get", "mpool", "-o", "wide", *names],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout


def test_op_084_pools_can_be_read_written_and_deleted_while_no_operator_runs(
    own_world: World, crds: Cluster
) -> None:
    """Nothing converts and nothing admits but the API server itself."""
    own_world.create("alone", replicas=1)
    own_world.patch("alone", {"spec": {"replicas": 2}})
    header, row = show_pools(own_world, crds, "alone").splitlines()
    assert header.split()[:2] == ["NAME", "MODEL"]
    assert row.split()[0] == "alone"
    own_world.delete("alone")
    wait_for("it is gone", lambda: not own_world.exists("alone"))


def test_the_wide_table_reads_well(world: World, crds: Cluster) -> None:
    """Columns are compared by their words, since their width follows the namespace's name."""
    crash = Behaviour(
        ready_after_seconds=None, terminated={"exitCode": 3, "message": "boom error"}, restarts=1
    )
    world.behaviours["wide-bad"] = lambda _pod: crash
    source = "file:///models/tiny.gguf"
    world.create("wide-good", replicas=2, model={"source": source, "name": "good"})
    world.create("wide-bad", replicas=1, model={"source": source, "name": "bad"})
    world.wait_ready("wide-good")
    world.wait_reason("wide-bad", "CrashLoop")
    printed = show_pools(world, crds, "wide-bad", "wide-good")
    shown = re.sub(r"\b(\d+m)?\d+s\b|\b\d+m\b", "0s", printed).replace(world.namespace, "NAMESPACE")
    assert [line.split() for line in shown.splitlines()] == [
        line.split() for line in WIDE.strip().splitlines()
    ]
    header, *rows = printed.splitlines()
    assert all(len(row) <= len(header) + 12 for row in rows), (
        "the last column alone may be longer than its name"
    )


def test_a_pool_without_gateway_is_ready_when_its_engines_answer(world: World) -> None:
    world.create("bare", replicas=1, gateway={"enabled": False})
    pool = world.wait_ready("bare")
    assert pool["status"]["endpoint"] == f"http://bare-engines.{world.namespace}.svc.cluster.local:8000/v1"
    (pod,) = world.list_pods("bare")
    assert pod["status"]["podIP"] in world.gateway.direct


def test_a_write_that_is_refused_shows_in_the_status_until_it_passes(own_world: World) -> None:
    world = own_world
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "none"},
        "spec": {"hard": {"services": "0"}},
    }
    world.kube.create(quota)
    wait_for(
        "the quota counts",
        lambda: world.kube.get("v1", "ResourceQuota", "none").get("status", {}).get("hard"),
    )
    world.start_operator()
    world.create("refused", replicas=1)
    condition = world.wait_reason("refused", "ApiError")
    assert "exceeded quota" in condition["message"]
    assert condition["status"] == "False"
    world.wait_event("refused", "ApiError")
    world.kube.delete("v1", "ResourceQuota", "none")
    world.wait_ready("refused")
