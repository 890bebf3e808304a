"""What the autoscaler sees of a gateway: true zeros after clients left, and a pool at zero that is still a pool."""

from __future__ import annotations

import asyncio
import json

import httpx
import msgspec
from tests.fixtures.gateway import MODEL, MakeEngine, MakeGateway, RunningGateway, Script, reset
from tests.gateway.wire import ask, make_request

from millpond_common.contract.gateway_report import GatewayReport, PoolReport
from millpond_common.contract.reasons import ScalingReason
from millpond_gateway.world.records import PoolView
from millpond_operator.scaling.aggregate import GatewaySample, make_demand
from millpond_operator.scaling.decide import decide
from millpond_operator.scaling.records import (
    Capacity,
    Decision,
    Recommended,
    ScalingLimits,
    ScalingSnapshot,
    Supply,
)

ASLEEP = "sleepy"
AT_ZERO = PoolView(
    name=ASLEEP, model=ASLEEP, may_be_zero=True, cold_start_hold_seconds=20.0, start_seconds=240.0
)
NUM_CLIENTS = 600


def make_body(model: str) -> bytes:
    return json.dumps({"model": model, "prompt": "hello " * 40, "stream": True}).encode()


async def fetch_pools(gateway: RunningGateway) -> dict[str, PoolReport]:
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"{gateway.admin_url}/v1/report")
    report = msgspec.json.decode(answer.content, type=GatewayReport)
    return {pool.pool: pool for pool in report.pools}


async def connect(gateway: RunningGateway, model: str) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.process.port)
    writer.write(make_request(make_body(model)))
    await writer.drain()
    return writer


def decide_for(report: PoolReport, now: float) -> Decision:
    """What the autoscaler makes of the report for a pool that has had no more need than one replica for long."""
    targets: dict[str, int | None] = {}
    demand = make_demand(
        [GatewaySample("g", now, report)], num_expected=1, known_since={}, targets=targets, now=now
    )
    snapshot = ScalingSnapshot(
        limits=ScalingLimits(1, 8, queued_tokens=8_000),
        supply=Supply(5),
        demand=demand,
        kv=None,
        capacity=Capacity(1_000.0),
        horizon_seconds=60.0,
        history=(Recommended(now - 400, 1), Recommended(now - 15, 1)),
    )
    return decide(snapshot, now)


def is_at_rest(pool: PoolReport) -> bool:
    waiting = (pool.held_requests, pool.held_tokens, pool.queued_tokens)
    return waiting == (0, 0, 0) and all(
        (e.open_requests, e.uncached_tokens) == (0, 0) for e in pool.endpoints
    )


async def test_op_057_clients_cut_at_once_leave_true_zeros_and_the_count_falls(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine(script=Script(hang=True))
    gateway = await make_gateway(engine)
    gateway.process.world.put_pool(AT_ZERO)
    clients = [await connect(gateway, model) for _ in range(NUM_CLIENTS) for model in (MODEL, ASLEEP)]
    async with asyncio.timeout(30):
        while (pools := await fetch_pools(gateway))[ASLEEP].held_requests < NUM_CLIENTS or (
            sum(e.open_requests for e in pools[MODEL].endpoints) + pools[MODEL].held_requests < NUM_CLIENTS
        ):
            await asyncio.sleep(0.05)
    assert pools[ASLEEP].held_tokens > 0
    assert pools[MODEL].queued_tokens + pools[MODEL].held_tokens > 0
    for writer in clients:
        reset(writer)
    async with asyncio.timeout(30):
        while engine.num_open or gateway.process.relay.num_requests or gateway.count_reserved():
            await asyncio.sleep(0.05)
    async with asyncio.timeout(30):  # a report is renewed now and then
        while not all(map(is_at_rest, (pools := await fetch_pools(gateway)).values())):
            await asyncio.sleep(0.05)
    for pool in pools.values():
        # A minute later the windows have passed the burst as well.
        quiet = msgspec.structs.replace(
            pool,
            uncached_tokens_per_second_15=0.0,
            uncached_tokens_per_second_60=0.0,
            output_tokens_per_second_60=0.0,
        )
        assert decide_for(quiet, 10_000.0).replicas == 1
        stuck = msgspec.structs.replace(quiet, queued_tokens=32_001)
        held = decide_for(stuck, 10_000.0)
        assert (held.replicas, held.reason) == (5, ScalingReason.STEADY), (
            "a gauge that leaked would have kept all"
        )


async def test_op_066_a_restarted_gateway_holds_for_a_pool_at_zero_and_all_answer_alike(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    gateways = [await make_gateway(options={"static": ("tiny=http://127.0.0.1:9",)}) for _ in range(3)]
    for gateway in gateways:
        gateway.process.world.expect("pools")
    early = [await ask(gateway, make_request(make_body(ASLEEP))) for gateway in gateways]
    assert {(answer.status, answer.find("retry-after")[0]) for answer in early} == {(503, "1")}, (
        "404 would be final"
    )

    brief = msgspec.structs.replace(AT_ZERO, cold_start_hold_seconds=0.3)
    for gateway in gateways:
        gateway.process.world.set_pools([brief], source="pools")
    body = json.dumps({"model": ASLEEP, "prompt": "hello"}).encode()
    past = await asyncio.gather(*(ask(gateway, make_request(body)) for gateway in gateways))
    assert {(answer.status, answer.code) for answer in past} == {(503, "cold_start")}
    assert all(200 <= int(answer.find("retry-after")[0]) <= 240 for answer in past), (
        "the start that was measured"
    )

    for gateway in gateways:
        gateway.process.world.set_pools([AT_ZERO], source="pools")
    held = [asyncio.create_task(ask(gateway, make_request(body))) for gateway in gateways]
    async with asyncio.timeout(20):
        while {(await fetch_pools(g))[ASLEEP].held_requests for g in gateways} != {1}:
            await asyncio.sleep(0.02)
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
