"""What requests used: asked of engines, hidden from clients, settled with tenants, priced."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest
from tests.fixtures.gateway import MODEL, FakeEngine, MakeEngine, MakeGateway, RunningGateway, Script
from tests.gateway.wire import STREAM_BODY, ask, make_request, talk

from millpond_gateway.flow.records import TenantPolicy
from millpond_gateway.world.records import PoolPricing


async def read_metric(gateway: RunningGateway, start: str) -> float:
    text = gateway.process.make_metrics_text()
    lines = [line for line in text.splitlines() if line.startswith(start)]
    assert lines, start
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@pytest.mark.parametrize("asked", [False, True])
async def test_gw_101_the_engine_is_asked_and_only_a_client_that_asked_is_told(
    asked: bool, make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine(script=Script(usage=True))
    gateway = await make_gateway(engine)
    body = json.loads(STREAM_BODY) | ({"stream_options": {"include_usage": True}} if asked else {})
    answer = await ask(gateway, make_request(json.dumps(body).encode()))
    assert json.loads(engine.seen[0].body)["stream_options"] == {"include_usage": True}
    assert (b'"usage"' in answer.body) is asked
    assert b"data: [DONE]" in answer.body
    assert answer.body.count(b'"text"') == 3
    assert await read_metric(gateway, "millpond_gateway_output_tokens_total") == 3
    assert await read_metric(gateway, "millpond_gateway_cached_tokens_total") == 4
    assert gateway.process.relay.buffered_bytes == 0


async def test_a_gateway_told_so_leaves_streams_alone(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine(script=Script(usage=True))
    gateway = await make_gateway(engine, hidden_usage=False)
    answer = await ask(gateway, make_request(STREAM_BODY))
    assert engine.seen[0].body == STREAM_BODY
    assert b'"usage"' in answer.body


async def leave_after(gateway: RunningGateway, engine: FakeEngine, num_events: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.process.port)
    writer.write(make_request(STREAM_BODY))
    received = b""
    async with asyncio.timeout(20):
        while received.count(b"\n\n") < num_events or (not num_events and not engine.seen):
            received += await reader.read(65536) if num_events else b""
            await asyncio.sleep(0.01)
    writer.close()
    await gateway.until_idle()


@pytest.mark.parametrize("num_events", [0, 3])
async def test_a_client_that_leaves_early_pays_for_its_prompt_and_what_it_got(
    num_events: int, make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    script = Script(num_chunks=100, chunk_seconds=0.3, first_seconds=0.0 if num_events else 30.0)
    engine = await make_engine(script=script)
    gateway = await make_gateway(engine)
    state = gateway.process.fleet.pools[MODEL]
    before = 100_000.0
    loop = asyncio.get_running_loop()
    began = loop.time()
    state.budgets.set_policies([TenantPolicy(name="", tokens_per_minute=100_000)])
    await leave_after(gateway, engine, num_events)
    level = state.budgets.level("", loop.time())
    assert level is not None
    refilled = 100_000 / 60 * (loop.time() - began)
    assert refilled < 100_000, "a full budget shows nothing"
    used = await read_metric(gateway, "millpond_gateway_output_tokens_total")
    prompt = await read_metric(gateway, "millpond_gateway_prompt_tokens_total")
    assert num_events <= used <= num_events + 3
    assert prompt > 0
    assert before - prompt - used - 1 <= level <= before - prompt - used + refilled


async def test_what_a_refused_or_failed_request_did_not_get_is_not_charged(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine(script=Script(die_before_head=True))
    gateway = await make_gateway(engine)
    answer = await ask(gateway, make_request(STREAM_BODY))
    assert answer.status == 502
    assert await read_metric(gateway, "millpond_gateway_prompt_tokens_total") == 0


async def test_cost_follows_the_pools_price_list(make_engine: MakeEngine, make_gateway: MakeGateway) -> None:
    engine = await make_engine()
    gateway = await make_gateway(engine)
    pool = gateway.process.world.snapshot.pools[MODEL]
    pricing = PoolPricing(
        currency="EUR", input_per_million=1e6, cached_input_per_million=1e5, output_per_million=2e6
    )
    gateway.process.world.put_pool(msgspec.structs.replace(pool, pricing=pricing))
    assert (await ask(gateway, make_request())).status == 200
    assert (await talk(gateway, make_request(STREAM_BODY))).endswith(b"0\r\n\r\n")
    cost = await read_metric(gateway, "millpond_gateway_cost_total")
    assert cost == pytest.approx(2 * (7 * 1 + 4 * 0.1 + 3 * 2))
    assert 'currency="EUR"' in gateway.process.make_metrics_text()


async def test_the_three_counts_of_cached_tokens_are_told_apart(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine()
    gateway = await make_gateway(engine)
    long = json.dumps({"model": MODEL, "prompt": "x" * 4000, "stream": True}).encode()
    for _ in range(2):
        await talk(gateway, make_request(long))
    prompt = 'millpond_gateway_index_tokens_total{pool="tiny",series="Prompt"'
    async with asyncio.timeout(20):  # the index's counts are told now and then
        while f"{prompt}}} 22.0" not in gateway.process.make_metrics_text():
            await asyncio.sleep(0.02)
    assert await read_metric(gateway, 'millpond_gateway_index_tokens_total{pool="tiny",series="Real"') == 8
    assert await read_metric(gateway, 'millpond_gateway_index_tokens_total{pool="tiny",series="Routed"') > 8
