"""State polls are spread, bounded, and follow what engines say."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.fixtures.gateway import MODEL, MakeEngine, MakeGateway
from tests.gateway.wire import ask, make_request

from millpond_common.contract.engine_state import BlockCounts, EngineState, Speeds
from millpond_gateway.app import poll
from millpond_gateway.app.poll import make_facts, round_speed
from millpond_gateway.proxy.fetch import Fetched, fetch
from millpond_gateway.world.records import Replica


async def test_gw_040_five_hundred_replicas_are_asked_few_at_a_time_and_once_per_interval(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine()
    gateway = await make_gateway(engine, options={"poll_seconds": 1.0})
    world = gateway.process.world
    replicas = [
        Replica(uid=f"u{n}", pod=f"p{n}", pool=MODEL, address=engine.address, ready=True) for n in range(500)
    ]
    world.set_replicas(replicas, source="static")
    async with asyncio.timeout(20):
        while not all(world.find_facts(replica.uid).answers for replica in replicas):
            await asyncio.sleep(0.02)
    assert gateway.process.relay.connections.num_open <= 520
    loop = asyncio.get_running_loop()
    before, began = engine.num_states, loop.time()
    async with asyncio.timeout(30):
        while engine.num_states - before < 1000:
            await asyncio.sleep(0.02)
    rounds = loop.time() - began + 1.0  # one may have begun before
    assert engine.num_states - before <= 1.1 * 500 * rounds


async def test_a_replica_that_never_answers_does_not_make_the_others_be_asked_more(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine()
    gateway = await make_gateway(engine, options={"poll_seconds": 0.5})
    dead = Replica(uid="dead", pod="dead", pool=MODEL, address="127.0.0.1:9", ready=True)
    gateway.process.world.put_replica(dead)
    before = engine.num_states
    await asyncio.sleep(1.5)
    assert engine.num_states - before <= 5


@pytest.mark.parametrize("num_lost", [1, 1000])
async def test_one_lost_answer_is_no_silence_and_more_are(
    make_engine: MakeEngine, make_gateway: MakeGateway, monkeypatch: pytest.MonkeyPatch, num_lost: int
) -> None:
    gateway = await make_gateway(await make_engine(), options={"poll_seconds": 0.2})
    lost = 0

    async def lose(*arguments: Any, **options: Any) -> Fetched:
        nonlocal lost
        if lost < num_lost:
            lost += 1
            raise ConnectionResetError("lost on the way")
        return await fetch(*arguments, **options)

    monkeypatch.setattr(poll, "fetch", lose)
    states = set()
    for _ in range(100):
        await asyncio.sleep(0.02)
        states.add((await ask(gateway, make_request())).status)
    assert lost == num_lost or lost >= 2
    assert states == ({200} if num_lost == 1 else {200, 503})


async def test_a_foreign_engine_is_ready_when_its_health_check_is(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine(serves_state=False, phase="Loading")
    gateway = await make_gateway(engine, wait=False)
    await asyncio.sleep(0.4)
    assert (await ask(gateway, make_request())).status == 503
    engine.phase = "Ready"
    await gateway.until_routable(1)
    assert (await ask(gateway, make_request())).status == 200


def test_facts_follow_the_phase() -> None:
    blocks = BlockCounts(free=1, cached=2, in_use=3)
    state = EngineState(
        epoch="e", model="m", phase="Ready", uptime_seconds=1.0, version="0", block_tokens=16, device=blocks,
        host=blocks, max_model_tokens=10, num_running=0, num_waiting=0, running_tokens=0, waiting_tokens=0,
        open_requests=0, cached_value_tokens=0, speeds=Speeds(prefill_tokens_per_second=1234.5),
    )  # fmt: skip
    facts = make_facts(state)
    assert (facts.ready, facts.draining, facts.num_blocks, facts.prefill_tokens_per_second) == (
        True,
        False,
        6,
        1200.0,
    )
    for phase, ready, draining in [("Loading", False, False), ("Draining", True, True), ("Asleep", False, False), ("Failed", False, False)]:  # fmt: skip
        changed = EngineState(**{**{f: getattr(state, f) for f in state.__struct_fields__}, "phase": phase})
        assert (make_facts(changed).ready, make_facts(changed).draining) == (ready, draining)
    assert round_speed(None) is None
