"""Limits of a tenant over several gateway processes: together they give what one of them would."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from tests.fixtures.gateway import MODEL, FakeEngine, MakeEngine, MakeGateway, RunningGateway, Script
from tests.gateway.wire import Answer, ask, make_request, talk
from tests.support.ports import find_port

from millpond_gateway.world.records import PoolTenant

NUM = 3
Start = Callable[..., Awaitable[list[RunningGateway]]]


@pytest.fixture
def start(make_gateway: MakeGateway) -> Start:
    async def make(engine: FakeEngine, **limits: int) -> list[RunningGateway]:
        ports = [find_port() for _ in range(NUM)]
        gateways = [
            await make_gateway(
                engine,
                options={
                    "peer_port": own,
                    "peers": tuple(f"127.0.0.1:{port}" for port in ports if port != own),
                },
            )
            for own in ports
        ]
        tenant = PoolTenant(name="acme", key_secret="keys", **limits)
        for gateway in gateways:
            pool = gateway.process.world.snapshot.pools[MODEL]
            gateway.process.world.put_pool(msgspec.structs.replace(pool, tenants=(tenant,)))
            gateway.process.fleet.keys.replace({"keys": [b"sesame"]})
        async with asyncio.timeout(30):
            while any(
                gateway.process.mesh is None or gateway.process.mesh.shared.num_synced_peers() < NUM - 1
                for gateway in gateways
            ):
                await asyncio.sleep(0.02)
        return gateways

    return make


def make_call(**fields: object) -> bytes:
    body = json.dumps({"model": MODEL, "prompt": "hi", **fields}).encode()
    return make_request(body, extra=("Authorization: Bearer sesame",))


async def ask_all(gateways: list[RunningGateway], num_each: int, call: bytes) -> list[Answer]:
    return await asyncio.gather(*(ask(gateway, call) for _ in range(num_each) for gateway in gateways))


async def until_seen(engine: FakeEngine, num: int) -> None:
    async with asyncio.timeout(30):
        while len(engine.seen) < num:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("limit", [1, 2, 5])
async def test_a_burst_at_all_gateways_at_once_gets_the_concurrency_of_one(
    make_engine: MakeEngine, start: Start, limit: int
) -> None:
    gate = asyncio.Event()
    engine = await make_engine(script=Script(gate=gate))
    gateways = await start(engine, max_concurrency=limit)
    running = [asyncio.create_task(ask(gateway, make_call())) for _ in range(6) for gateway in gateways]
    async with asyncio.timeout(30):
        while sum(task.done() for task in running) < 6 * NUM - limit:
            await asyncio.sleep(0.01)
    await until_seen(engine, limit)
    gate.set()
    answers = await asyncio.gather(*running)
    assert sorted(answer.status for answer in answers) == [200] * limit + [429] * (6 * NUM - limit)
    assert {answer.code for answer in answers if answer.status == 429} == {"tenant_concurrency"}
    assert engine.max_open == limit
    budgets = gateways[0].process.fleet.pools[MODEL].budgets
    async with asyncio.timeout(30):  # until the first gateway knows that all have ended
        while (await ask(gateways[0], make_call())).status != 200:
            await asyncio.sleep(0.02)
    assert budgets.num_open("acme") == 0


async def test_a_burst_at_all_gateways_at_once_gets_the_tokens_of_one(
    make_engine: MakeEngine, start: Start
) -> None:
    engine = await make_engine(script=Script(prompt_tokens=100, num_chunks=900))
    gateways = await start(engine, tokens_per_minute=5000)
    answers = await ask_all(gateways, 6, make_call(max_tokens=900))
    served = sum(answer.status == 200 for answer in answers)
    assert served == 5, "five of 900 and the prompt fit, six do not"
    assert {answer.code for answer in answers if answer.status == 429} == {"tenant_tokens"}
    retry = {value for answer in answers if answer.status == 429 for value in answer.find("retry-after")}
    assert all(1 <= int(value) <= 60 for value in retry)


async def test_gw_100_every_answer_of_a_prompt_is_reserved(make_engine: MakeEngine, start: Start) -> None:
    engine = await make_engine()
    gateways = await start(engine, tokens_per_minute=5000)
    for many in ({"n": 6}, {"best_of": 6}):
        answer = await ask(gateways[0], make_call(max_tokens=900, **many))
        assert (answer.status, answer.code) == (429, "tenant_tokens")
    assert engine.seen == []
    assert (await ask(gateways[0], make_call(max_tokens=900, n=4))).status == 200


async def test_gw_100_what_one_gateway_reserved_the_others_charge_in_full(
    make_engine: MakeEngine, start: Start
) -> None:
    """Long answers were told as 256 tokens: each gateway gave away most of the limit once more."""
    gate = asyncio.Event()
    engine = await make_engine(script=Script(gate=gate))
    gateways = await start(engine, tokens_per_minute=5000)
    running = asyncio.create_task(ask(gateways[0], make_call(max_tokens=4000)))
    await until_seen(engine, 1)
    budgets = [gateway.process.fleet.pools[MODEL].budgets for gateway in gateways]
    now = asyncio.get_running_loop().time
    async with asyncio.timeout(30):
        while any((book.level("acme", now()) or 0) > 2000 for book in budgets):
            await asyncio.sleep(0.01)
    refused = await ask(gateways[1], make_call(max_tokens=3000))
    assert (refused.status, refused.code) == (429, "tenant_tokens")
    gate.set()
    assert (await running).status == 200


async def test_what_a_client_that_left_did_not_use_comes_back_everywhere(
    make_engine: MakeEngine, start: Start
) -> None:
    engine = await make_engine(script=Script(hang=True))
    gateways = await start(engine, tokens_per_minute=5000)
    task = asyncio.create_task(talk(gateways[0], make_call(max_tokens=4000, stream=True), seconds=0.3))
    await until_seen(engine, 1)
    await task
    now = asyncio.get_running_loop().time
    budgets = [gateway.process.fleet.pools[MODEL].budgets for gateway in gateways]
    async with asyncio.timeout(20):  # nothing refills so much in that time
        while any((book.level("acme", now()) or 0) < 4800 for book in budgets):
            await asyncio.sleep(0.02)


async def test_what_a_gateway_holds_is_charged_at_the_others(make_engine: MakeEngine, start: Start) -> None:
    engine = await make_engine()
    gateways = await start(engine, tokens_per_minute=5000)
    for gateway in gateways:
        world = gateway.process.world
        pool = world.snapshot.pools[MODEL]
        world.put_pool(msgspec.structs.replace(pool, cold_start_hold_seconds=60, may_be_zero=True))
        (replica,) = world.replicas
        world.put_replica(msgspec.structs.replace(replica, cordoned=True))
    held = [asyncio.create_task(talk(gateways[0], make_call(max_tokens=4000), seconds=60))]
    states = [gateway.process.fleet.pools[MODEL] for gateway in gateways]
    async with asyncio.timeout(30):
        while not all(state.num_held for state in states):
            await asyncio.sleep(0.01)
    refused = await ask(gateways[1], make_call(max_tokens=3000))
    assert (refused.status, refused.code) == (429, "tenant_tokens")
    for gateway in gateways:
        (replica,) = gateway.process.world.replicas
        gateway.process.world.put_replica(msgspec.structs.replace(replica, cordoned=False))
    assert (await held[0]).startswith(b"HTTP/1.1 200")


async def test_a_claiming_client_that_leaves_frees_its_place(make_engine: MakeEngine, start: Start) -> None:
    gate = asyncio.Event()
    engine = await make_engine(script=Script(gate=gate))
    gateways = await start(engine, max_concurrency=1)
    desk = gateways[0].process.fleet.pools[MODEL].claims
    for _ in range(5):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateways[0].process.port)
        writer.write(make_call())
        async with asyncio.timeout(30):
            while not len(desk) and not engine.seen:
                await asyncio.sleep(0)
        writer.transport.abort()
        del reader
    async with asyncio.timeout(30):
        while len(desk) or engine.num_open:
            await asyncio.sleep(0.01)
    gate.set()
    assert (await ask(gateways[1], make_call())).status == 200
    for gateway in gateways:
        assert gateway.process.fleet.pools[MODEL].budgets.num_open("acme") == 0
