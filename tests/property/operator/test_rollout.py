"""The planner against a simulated cluster: never too few, never too many, always at the end, whatever happens."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.sim_cluster import SETTINGS, SimCluster, make_spec

from millpond_common.contract import labels
from millpond_common.contract.reasons import ConditionType
from millpond_operator.api.pool import list_roles
from millpond_operator.api.status import get_condition
from millpond_operator.desired.revision import compute_revision

STRATEGIES = st.sampled_from(["Auto", "Surge", "Replace"])
MAX_ROUNDS = 400


def tolerated(sim: SimCluster) -> int:
    rollout = sim.spec["rollout"]
    allowed = rollout.get("maxUnavailable", 0)
    # Replace, and Auto without room, take one replica away first: they cannot do otherwise.
    return max(1, allowed) if rollout.get("strategy", "Auto") != "Surge" else allowed


def surge(desired: int) -> int:
    return max(1, desired * SETTINGS.surge_percent // 100)


def run(sim: SimCluster, *, crash_after: int | None = None) -> None:
    """One reconcile and one tick, with the invariants checked on both."""
    desired = sim.spec["replicas"]
    answering, existing = sim.count_answering(), len(sim.pods)
    sim.execute(sim.decide(), crash_after=crash_after)
    sim.step()
    floor = min(answering, max(0, desired - tolerated(sim)))
    assert sim.count_answering() >= floor, f"{sim.count_answering()} answer, at least {floor} must"
    # What was killed by hand is replaced at once, while it still leaves.
    by_hand = sum(1 for pod in sim.pods.values() if pod.uid in sim.killed)
    ceiling = max(existing, desired + surge(desired)) + by_hand
    assert len(sim.pods) <= ceiling, f"{len(sim.pods)} pods, at most {ceiling} may exist"


def settle(sim: SimCluster) -> None:
    for _ in range(MAX_ROUNDS):
        decided = sim.decide()
        if not decided.actions and decided.status is None and is_settled(sim):
            return
        run(sim)
    raise AssertionError(f"not settled after {MAX_ROUNDS} rounds: {sim.status}")


def is_settled(sim: SimCluster) -> bool:
    pool = sim.make_pool()
    revision = compute_revision(pool, list_roles(pool)[0])
    right = [pod for pod in sim.pods.values() if pod.revision == revision]
    return len(right) == len(sim.pods) == sim.spec["replicas"] == sim.count_answering()


def check_end(sim: SimCluster) -> None:
    pool = sim.make_pool()
    revision = compute_revision(pool, list_roles(pool)[0])
    assert [w["metadata"]["labels"][labels.REVISION] for w in sim.list_workloads()] == [revision]
    ready = get_condition(sim.status, ConditionType.READY)
    assert ready is not None
    assert (ready.status == "True") == (sim.spec["replicas"] > 0)
    assert sim.status.ready_replicas == sim.status.updated_replicas == sim.spec["replicas"]


@st.composite
def clusters(draw: st.DrawFn) -> SimCluster:
    replicas = draw(st.integers(1, 9))
    spec = make_spec(replicas=replicas, strategy=draw(STRATEGIES), maxUnavailable=draw(st.integers(0, 3)))
    if spec["rollout"]["strategy"] == "Replace":
        spec["rollout"]["maxUnavailable"] = max(1, spec["rollout"]["maxUnavailable"])
    return SimCluster(
        spec,
        load_ticks=draw(st.integers(0, 4)),
        drain_ticks=draw(st.integers(1, 5)),
        route_ticks=draw(st.integers(0, 3)),
        knows_capacity=draw(st.booleans()),
    )


@given(clusters(), st.data())
@settings(max_examples=40, deadline=None)
def test_op_016_converges_after_a_crash_behind_any_write(sim: SimCluster, data: st.DataObject) -> None:
    """Changes of image, count and strategy at random moments, crashes behind random writes, pods killed by hand."""
    for _ in range(data.draw(st.integers(1, 25))):
        change = data.draw(st.sampled_from(["none", "image", "replicas", "kill", "gateway"]))
        if change == "image":
            sim.spec["engine"] = {"image": data.draw(st.sampled_from(["good", "better", "best", "bad"]))}
            sim.generation += 1
        elif change == "replicas":
            sim.spec["replicas"] = data.draw(st.integers(0, 9))
            sim.generation += 1
        elif change == "kill" and sim.pods:
            victim = data.draw(st.sampled_from(list(sim.pods.values())))
            sim.killed.add(victim.uid)
            sim.kill(victim)
        elif change == "gateway":
            sim.gateway_up = not sim.gateway_up
        run(sim, crash_after=data.draw(st.sampled_from([None, None, 0, 1, 2, 3, 5, 8])))
    sim.spec["engine"] = {"image": "good"}
    sim.gateway_up = True
    sim.generation += 1
    settle(sim)
    check_end(sim)


@given(clusters())
@settings(max_examples=40, deadline=None)
def test_a_full_cluster_rolls_without_room(sim: SimCluster) -> None:
    """As many GPUs as replicas: only replacing one by one can work, unless the strategy insists on Surge."""
    sim.gpus = sim.spec["replicas"]
    settle(sim)
    sim.spec["engine"] = {"image": "better"}
    sim.generation += 1
    if sim.spec["rollout"]["strategy"] == "Surge" and sim.spec["rollout"]["maxUnavailable"] == 0:
        for _ in range(20):
            run(sim)
        assert sim.count_answering() == sim.spec["replicas"], "a surge without room waits and breaks nothing"
        return
    settle(sim)
    check_end(sim)


@given(clusters())
@settings(max_examples=20, deadline=None)
def test_op_021_unready_old_replicas_use_no_budget(sim: SimCluster) -> None:
    sim.spec["engine"] = {"image": "bad"}
    for _ in range(10):
        run(sim)
    assert sim.count_answering() == 0
    sim.spec["engine"] = {"image": "good"}
    sim.generation += 1
    settle(sim)
    check_end(sim)


@given(clusters(), st.integers(0, 30))
@settings(max_examples=20, deadline=None)
def test_a_bad_revision_never_takes_the_good_one_down(sim: SimCluster, more_rounds: int) -> None:
    settle(sim)
    sim.spec["engine"] = {"image": "bad"}
    sim.generation += 1
    for _ in range(20 + more_rounds):
        run(sim)
    assert sim.count_answering() >= sim.spec["replicas"] - tolerated(sim)
    ready = get_condition(sim.status, ConditionType.READY)
    assert ready is not None
    assert ready.status == "False"


@given(clusters())
@settings(max_examples=20, deadline=None)
def test_a_settled_pool_is_left_alone(sim: SimCluster) -> None:
    settle(sim)
    before = sim.writes
    for _ in range(10):
        decided = sim.decide()
        assert decided.actions == ()
        assert decided.status is None
        assert decided.events == ()
        sim.step()
    assert sim.writes == before


@given(clusters())
@settings(max_examples=20, deadline=None)
def test_op_019_new_defaults_of_the_operator_restart_no_engine(sim: SimCluster) -> None:
    del sim.spec["engine"]
    settle(sim)
    upgraded = dataclasses.replace(
        SETTINGS,
        build=dataclasses.replace(SETTINGS.build, engine_image="engine:2", operator_namespace="elsewhere"),
    )
    pods = set(sim.pods)
    for _ in range(10):
        sim.execute(sim.decide(upgraded))
        sim.step()
    assert set(sim.pods) == pods
    sim.spec["engine"] = {"maxModelTokens": 4096}
    sim.generation += 1
    for _ in range(MAX_ROUNDS):
        if is_settled(sim):
            break
        sim.execute(sim.decide(upgraded))
        sim.step()
    assert {pod.annotations["image"] for pod in sim.pods.values()} == {"engine:2"}
