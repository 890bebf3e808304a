"""What decisions read of the API server's objects."""

from __future__ import annotations

from millpond_common.contract import labels
from millpond_operator.desired.kinds import SERVICE
from millpond_operator.observe.parse import parse_child, parse_pod, parse_workload

POD = {
    "metadata": {
        "name": "p", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z", "deletionTimestamp": "2026-01-01T00:05:00Z",
        "labels": {labels.REVISION: "r", labels.ROLE: "both", labels.CORDONED: "true"},
        "annotations": {"controller.kubernetes.io/pod-deletion-cost": "-7"},
    },
    "spec": {"nodeName": "n"},
    "status": {
        "phase": "Running", "podIP": "10.0.0.9",
        "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:01:00Z"}],
        "initContainerStatuses": [{"name": "fetch-model", "ready": True, "restartCount": 2, "state": {"terminated": {"exitCode": 0}}}],
        "containerStatuses": [
            {
                "name": "engine", "ready": False, "restartCount": 3,
                "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
                "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled", "message": "m"}},
            }
        ],
    },
}  # fmt: skip


def test_a_pod() -> None:
    pod = parse_pod(POD)
    assert (pod.revision, pod.role, pod.cordoned, pod.deleting, pod.scheduled) == (
        "r",
        "both",
        True,
        True,
        True,
    )
    assert (pod.deletion_cost, pod.restarts, pod.ready, pod.serving) == (-7, 5, True, False)
    assert pod.ready_since == pod.created_at + 60
    assert pod.deletion_deadline == pod.created_at + 300
    engine = pod.containers[1]
    assert (engine.waiting_reason, engine.exit_code, engine.exit_reason, engine.running) == (
        "CrashLoopBackOff",
        137,
        "OOMKilled",
        False,
    )
    assert pod.containers[0].is_init


def test_a_pod_nobody_has_looked_at_yet() -> None:
    pod = parse_pod({"metadata": {"name": "p", "uid": "u"}})
    assert (pod.ready, pod.scheduled, pod.phase, pod.containers) == (False, False, "Pending", ())
    assert (pod.unschedulable_message, pod.deletion_deadline, pod.ready_since) == ("", None, None)


def test_a_pod_without_room() -> None:
    condition = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes"}
    pod = parse_pod({"metadata": {"name": "p", "uid": "u"}, "status": {"conditions": [condition]}})
    assert pod.unschedulable_message == "0/1 nodes"


def test_a_workload_whose_pods_cannot_be_created() -> None:
    failure = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}
    obj = {
        "metadata": {"name": "w", "uid": "u", "generation": 4},
        "spec": {"replicas": 2},
        "status": {"conditions": [failure]},
    }
    workload = parse_workload(obj, "kubectl")
    assert (workload.wanted, workload.failure_message, workload.replicas_manager) == (
        2,
        "exceeded quota",
        "kubectl",
    )


def test_a_child_and_its_controller() -> None:
    owners = [{"uid": "a"}, {"uid": "b", "controller": True}]
    child = parse_child(SERVICE, {"metadata": {"name": "s", "uid": "u", "ownerReferences": owners}})
    assert (child.controller_uid, child.owner_uids, child.digest) == ("b", frozenset({"a", "b"}), "")


def test_a_pod_that_failed_as_a_whole_says_why() -> None:
    metadata = {"name": "p", "uid": "u"}
    told = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
    assert parse_pod({"metadata": metadata, "status": told}).failure == "Evicted: " + told["message"]
    assert parse_pod({"metadata": metadata, "status": {"phase": "Failed"}}).failure == "no reason given"
    assert parse_pod({"metadata": metadata, "status": {"phase": "Running", "reason": "x"}}).failure == ""
