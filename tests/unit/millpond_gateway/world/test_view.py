from __future__ import annotations

from millpond_gateway.world.records import EngineFacts, PoolView, Replica, WorldSnapshot
from millpond_gateway.world.view import World, make_endpoint

POOL = PoolView(name="chat", model="chat", max_model_tokens=4096)


def make_replica(uid: str = "u1", **changes: object) -> Replica:
    values = {
        "uid": uid,
        "pod": f"pod-{uid}",
        "pool": "chat",
        "address": "10.0.0.1:8000",
        "ready": True,
        **changes,
    }
    return Replica(**values)  # type: ignore[arg-type]


def test_every_change_tells_the_listener_and_no_change_does_not() -> None:
    seen: list[WorldSnapshot] = []
    world = World()
    world.listen(seen.append)
    world.put_pool(POOL)
    world.put_replica(make_replica())
    world.put_replica(make_replica())
    world.put_facts("u1", EngineFacts(answers=True, epoch="e"))
    world.put_facts("gone", EngineFacts(answers=True))
    world.remove_replica("u1")
    world.remove_replica("u1")
    assert [len(snapshot.endpoints.get("chat", ())) for snapshot in seen] == [0, 0, 1, 1, 0]


def test_a_replica_that_comes_back_under_its_address_is_another_one() -> None:
    world = World()
    world.put_pool(POOL)
    world.put_replica(make_replica("u1"))
    world.put_facts("u1", EngineFacts(answers=True, epoch="e1", num_blocks=10))
    world.set_replicas([make_replica("u2")], source="pods")
    (endpoint,) = world.snapshot.endpoints["chat"]
    assert (endpoint.uid, endpoint.epoch, endpoint.num_blocks) == ("u2", None, None)


def test_gw_026_two_hundred_replicas_at_once_are_all_known() -> None:
    world = World()
    world.put_pool(POOL)
    for number in range(200):
        world.put_replica(make_replica(f"u{number}"))
    assert len(world.snapshot.endpoints["chat"]) == 200


def test_gw_032_the_age_is_that_of_the_stalest_source() -> None:
    world = World()
    world.expect("pools")
    world.expect("pods")
    assert world.compute_age_seconds(0.0) is None
    world.set_pools([], source="pools")
    world.prove("pools", 10.0)
    assert not world.snapshot.synced
    world.set_replicas([], source="pods")
    world.prove("pods", 20.0)
    assert world.snapshot.synced
    assert world.compute_age_seconds(25.0) == 15.0


def test_the_stricter_word_about_readiness_wins() -> None:
    cases = {
        (True, True, False): True,  # pod ready, engine ready, static
        (True, False, False): False,
        (False, True, False): False,
    }
    for (pod, engine, static), expected in cases.items():
        endpoint = make_endpoint(
            POOL, make_replica(ready=pod, static=static), EngineFacts(answers=True, ready=engine)
        )
        assert endpoint.ready is expected
    assert not make_endpoint(POOL, make_replica(static=True), EngineFacts()).ready
    assert make_endpoint(POOL, make_replica(static=True), EngineFacts(answers=True)).ready


def test_a_draining_engine_is_cordoned_and_limits_are_the_smaller() -> None:
    facts = EngineFacts(answers=True, draining=True, max_model_tokens=2048, block_tokens=32)
    endpoint = make_endpoint(POOL, make_replica(), facts)
    assert endpoint.cordoned
    assert (endpoint.max_model_tokens, endpoint.block_tokens) == (2048, 32)


def test_a_replica_of_an_unknown_pool_is_kept_until_the_pool_comes() -> None:
    world = World()
    world.put_replica(make_replica())
    assert world.snapshot.endpoints == {}
    world.put_pool(POOL)
    assert len(world.snapshot.endpoints["chat"]) == 1
