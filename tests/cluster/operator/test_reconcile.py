"""From a pool to running replicas, and who owns which field."""

from __future__ import annotations

import pytest
from kubernetes import client
from tests.support.kube import WAIT_SECONDS, wait_for
from tests.support.operator_world import POOL_API, World, find_condition

from millpond_common.contract import labels
from millpond_operator.desired.kinds import EVENT, LEASE, NODE, SECRET
from millpond_operator.loop.resync import WATCHED

pytestmark = pytest.mark.cluster


def test_a_pool_becomes_ready_with_everything_it_needs(world: World) -> None:
    world.create("plain", replicas=2)
    status = world.wait_ready("plain")["status"]
    assert (
        status["readyReplicas"]
        == status["updatedReplicas"]
        == status["desiredReplicas"]
        == status["replicas"]
        == 2
    )
    assert status["endpoint"] == f"http://millpond-gateway.{world.namespace}.svc.cluster.local/v1"
    assert status["modelName"] == "plain"
    pods = world.kube.list("v1", "Pod", label_selector=status["selector"])
    assert len(pods) == 2
    asked = set(world.gateway.probes)
    assert {pod["metadata"]["uid"] for pod in pods} <= asked, "Ready without a real request to each replica"
    (deployment,) = world.list_workloads("plain")
    assert deployment["metadata"]["name"] == f"plain-{status['revision']}"
    owner = deployment["metadata"]["ownerReferences"][0]
    assert (owner["kind"], owner["controller"]) == ("InferencePool", True)
    assert world.kube.exists("apps/v1", "Deployment", "millpond-gateway")


def test_op_001_a_scaler_through_the_scale_subresource_is_never_fought(world: World) -> None:
    world.create("scaled", replicas=1)
    world.wait_ready("scaled")
    scale = world.kube.resource(*POOL_API).subresources["scale"]
    body = {"spec": {"replicas": 4}}
    scale.patch(
        name="scaled", namespace=world.namespace, body=body, content_type="application/merge-patch+json"
    )
    world.wait_ready("scaled")
    (before,) = world.list_workloads("scaled")
    for _ in range(100):
        world.operator.mark("scaled")
    world.look("scaled")
    world.operator.resync()
    world.look("scaled")
    (after,) = world.list_workloads("scaled")
    assert world.get("scaled")["spec"]["replicas"] == 4
    assert after["spec"]["replicas"] == 4
    assert after["metadata"]["generation"] == before["metadata"]["generation"]
    managers = world.get("scaled")["metadata"]["managedFields"]
    ours = [m for m in managers if m["manager"].startswith(labels.MANAGER)]
    assert not [m for m in ours if "f:spec" in m["fieldsV1"]], "the operator owns a field of the spec"


def test_op_002_idle_resyncs_change_and_write_nothing(own_world: World) -> None:
    """The operator is one of the test's own, since its writes are counted."""
    world = own_world
    world.start_operator()
    world.create("idle", replicas=1)
    world.wait_ready("idle")
    # Kubernetes' own controllers write the status of these two a little later.
    shared = [("apps/v1", "Deployment", "generation"), ("policy/v1", "PodDisruptionBudget", "generation")]
    owned = [("v1", "Service", "resourceVersion"), ("v1", "ConfigMap", "resourceVersion")]

    def read() -> list[object]:
        versions = [
            o["metadata"][what]
            for *kind, what in shared + owned
            for o in world.kube.list(*kind, label_selector=f"{labels.POOL}=idle")
        ]
        return [*versions, world.get("idle")["metadata"]["resourceVersion"]]

    world.look("idle", times=3)
    before, calls = read(), world.count_calls()
    assert len(before) > 4
    for _ in range(3):
        for _ in range(33):
            world.operator.mark("idle")
        world.operator.resync()
        world.look("idle")
    assert read() == before
    assert _count_writes(world.count_calls() - calls) == 0


def _count_writes(calls: object) -> int:
    assert isinstance(calls, dict)
    verbs = ("apply", "create", "patch", "delete")
    return sum(num for (verb, kind), num in calls.items() if verb in verbs and kind not in ("Lease",))


def test_op_003_a_change_of_a_child_shows_at_once(world: World) -> None:
    from tests.support.kubelet import Behaviour

    state = {"ready": None}
    world.behaviours["follows"] = lambda _pod: Behaviour(ready_after_seconds=state["ready"])
    world.create("follows", replicas=1)
    world.wait_reason("follows", "ReplicasNotReady")
    state["ready"] = 0.0  # type: ignore[assignment]
    world.wait_ready("follows")
    assert world.operator.settings.resync_seconds > WAIT_SECONDS, "a full list cannot have told it"


def test_op_006_counts_that_change_at_random_end_where_the_spec_says(world: World) -> None:
    import random

    chance = random.Random(6)
    world.create("restless", replicas=0)
    for number in range(50):
        world.patch("restless", {"spec": {"replicas": 4 if number % 2 else 0}})
        if chance.random() < 0.2:
            wait_for("a moment", lambda: True)
    world.patch("restless", {"spec": {"replicas": 3}})
    world.wait_ready("restless")
    assert [d["spec"]["replicas"] for d in world.list_workloads("restless")] == [3]
    world.wait_pods("restless", "only the wanted ones", lambda pods: len(pods) == 3, leaving=True)


def test_op_008_a_pod_deleted_by_hand_is_replaced(world: World) -> None:
    world.create("bitten", replicas=2)
    world.wait_ready("bitten")
    victim = world.list_pods("bitten")[0]["metadata"]
    world.kube.delete("v1", "Pod", victim["name"])
    successors = world.wait_pods(
        "bitten",
        "two without the deleted one",
        lambda pods: len(pods) == 2 and victim["uid"] not in {p["metadata"]["uid"] for p in pods},
        leaving=True,
    )
    probed = {pod["metadata"]["uid"] for pod in successors}
    wait_for("the successor answers", lambda: probed <= set(world.gateway.probes))
    world.wait_pool(
        "bitten",
        "Ready with two",
        lambda pool: (
            (pool["status"]["replicas"], pool["status"]["readyReplicas"]) == (2, 2)
            and find_condition(pool)["status"] == "True"
        ),
    )


def test_op_017_a_child_scaled_by_hand_is_set_back_once_with_one_event(world: World) -> None:
    world.create("edited", replicas=1)
    world.wait_ready("edited")
    (deployment,) = world.list_workloads("edited")
    name = deployment["metadata"]["name"]
    world.kube.resource("apps/v1", "Deployment").patch(
        name=name, namespace=world.namespace, body={"spec": {"replicas": 3}},
        content_type="application/merge-patch+json", field_manager="somebody",
    )  # fmt: skip
    wait_for("it is set back", lambda: world.list_workloads("edited")[0]["spec"]["replicas"] == 1)
    world.wait_ready("edited")
    world.wait_event("edited", "Conflict")
    world.look("edited", times=2)
    (event,) = world.list_events("edited", "Conflict")
    assert event["count"] == 1
    assert "somebody" in event["message"]
    assert "kubectl scale mpool/edited" in event["message"]
    (after,) = world.list_workloads("edited")
    assert after["metadata"]["generation"] == deployment["metadata"]["generation"] + 2


def test_other_managers_may_own_other_fields(world: World) -> None:
    world.create("shared", replicas=1)
    world.wait_ready("shared")
    (deployment,) = world.list_workloads("shared")
    name = deployment["metadata"]["name"]
    theirs = {
        "apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": {"name": name, "annotations": {"team": "search"}, "labels": {"cost": "42"}},
    }  # fmt: skip
    # The API server counts changed annotations of a Deployment as a generation, so the number to keep is this one.
    generation = world.kube.apply(theirs, manager="argo")["metadata"]["generation"]
    assert generation == deployment["metadata"]["generation"] + 1
    world.look("shared", times=2)
    world.operator.resync()
    world.look("shared")
    (after,) = world.list_workloads("shared")
    assert after["metadata"]["annotations"]["team"] == "search"
    assert after["metadata"]["generation"] == generation


def test_a_deleted_child_comes_back(world: World) -> None:
    world.create("robbed", replicas=1)
    world.wait_ready("robbed")
    world.kube.delete("v1", "Service", "robbed-engines")
    wait_for("the Service is back", lambda: world.kube.exists("v1", "Service", "robbed-engines"))


def test_adoption_is_refused_until_the_name_is_free(world: World) -> None:
    foreign = {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "taken-engines"},
        "spec": {"ports": [{"port": 1234}], "selector": {"app": "theirs"}},
    }  # fmt: skip
    world.kube.create(foreign)
    world.create("taken", replicas=1)
    condition = world.wait_reason("taken", "ChildNotOurs")
    assert "Service taken-engines" in condition["message"]
    kept = world.kube.get("v1", "Service", "taken-engines")
    assert kept["spec"]["ports"][0]["port"] == 1234
    assert not kept["metadata"].get("ownerReferences")
    world.kube.delete("v1", "Service", "taken-engines")
    world.operator.resync()
    world.wait_ready("taken")


def test_op_029_marks_in_a_burst_make_nothing_twice(world: World) -> None:
    world.create("burst", replicas=2)
    for _ in range(50):
        world.operator.mark("burst")
    world.wait_ready("burst")
    world.look("burst")
    assert len(world.list_workloads("burst")) == 1
    assert len(world.list_pods("burst", leaving=True)) == 2


def test_op_049_the_scale_subresource_selects_the_engine_pods_and_no_others(world: World) -> None:
    world.create("measured", replicas=2)
    world.wait_ready("measured")
    scale = (
        world.kube.resource(*POOL_API).subresources["scale"].get(name="measured", namespace=world.namespace)
    )
    selected = world.kube.list("v1", "Pod", label_selector=scale.status.selector)
    names = {pod["metadata"]["name"] for pod in selected}
    assert names == {pod["metadata"]["name"] for pod in world.list_pods("measured")}
    assert (scale.spec.replicas, scale.status.replicas) == (2, 2)


def test_op_093_a_pool_without_room_waits_with_a_reason_and_starts_by_itself(world: World) -> None:
    from tests.support.kubelet import Behaviour

    taken = [True]
    world.behaviours["second"] = lambda _pod: Behaviour(schedules=not taken)
    world.create("second", replicas=1)
    world.wait_reason("second", "Unschedulable")
    taken.clear()
    world.wait_ready("second")


def test_op_007_the_operator_uses_no_api_that_may_be_missing(own_world: World) -> None:
    """KEDA, monitors, gangs of pods: none is installed here, none is asked for, and pools work.

    The operator is one of the test's own: others have pools that name optional kinds.
    """
    world = own_world
    optional = {"keda.sh", "monitoring.coreos.com", "leaderworkerset.x-k8s.io", "scheduling.volcano.sh"}
    served = {group.name for group in client.ApisApi(world.kube.api_client).get_api_versions().groups}
    if optional <= served:
        pytest.skip("every optional API is installed in this cluster")
    world.start_operator()
    world.create("spartan", replicas=1)
    world.wait_ready("spartan")
    known = {kind.name for kind in (*WATCHED, EVENT, LEASE, SECRET, NODE)} | {"HorizontalPodAutoscaler"}
    assert {kind for _, kind in world.count_calls()} <= known
