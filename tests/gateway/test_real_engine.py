"""The gateway before Millpond's own engine: real scheduler and server, fake runner."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest
from tests.fixtures.gateway import MakeGateway, RunningGateway
from tests.support.engine_server import Running, Setup, run_engine

MODEL = "fake"


async def start(make_gateway: MakeGateway, *engines: Running) -> RunningGateway:
    static = f"{MODEL}={','.join(engine.url for engine in engines)}"
    gateway = await make_gateway(options={"static": (static,)})
    await gateway.until_routable(len(engines), MODEL)
    return gateway


def connect(gateway: RunningGateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)


async def test_chat_streams_and_completes_with_usage(make_gateway: MakeGateway) -> None:
    async with run_engine() as engine:
        gateway = await start(make_gateway, engine)
        async with connect(gateway) as client:
            models = await client.models.list()
            assert models.data[0].id == MODEL
            messages = [{"role": "user", "content": "hello"}]
            plain = await client.chat.completions.create(model=MODEL, messages=messages, temperature=0)  # type: ignore[arg-type]
            stream = await client.chat.completions.create(
                model=MODEL, messages=messages, temperature=0, stream=True
            )  # type: ignore[arg-type]
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        assert text == plain.choices[0].message.content
        assert plain.usage is not None
        assert plain.usage.completion_tokens > 0
        await gateway.until_idle()
        await engine.settle()


async def test_a_repeated_prompt_of_token_ids_goes_where_it_was_and_is_found_there(
    make_gateway: MakeGateway,
) -> None:
    async with run_engine(Setup()) as one, run_engine(Setup()) as two:
        gateway = await start(make_gateway, one, two)
        prompt = [7 + number % 50 for number in range(160)]
        cached = []
        async with connect(gateway) as client:
            for _ in range(4):
                answer = await client.completions.create(
                    model=MODEL, prompt=prompt, max_tokens=2, temperature=0
                )
                assert answer.usage is not None
                assert answer.usage.prompt_tokens_details is not None
                cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
        assert cached[0] == 0
        assert min(cached[1:]) >= 144  # all but the last, recomputed block
        totals = gateway.process.fleet.pools[MODEL].router.index.totals
        assert totals.predicted_tokens == totals.real_tokens == sum(cached)


@pytest.mark.parametrize("stream", [True, False])
async def test_gw_051_the_engine_stops_when_the_client_leaves(
    stream: bool, make_gateway: MakeGateway
) -> None:
    async with run_engine(Setup(output_tokens=900)) as engine:
        gateway = await start(make_gateway, engine)
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 900, "stream": stream, "ignore_eos": True}
        async with httpx.AsyncClient() as client:
            task = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json=body))
            await engine.wait_for(lambda: engine.context.lifecycle.open_requests > 0)
            task.cancel()
        await engine.settle(2.0)
        await gateway.until_idle()


async def test_a_probe_makes_the_engine_generate_a_token(make_gateway: MakeGateway) -> None:
    async with run_engine() as engine:
        gateway = await start(make_gateway, engine)
        await gateway.until_told(MODEL)
        (replica,) = gateway.process.world.replicas
        async with httpx.AsyncClient() as client:
            answer = await client.post(
                f"{gateway.admin_url}/v1/probe", json={"pool": MODEL, "podUid": replica.uid}
            )
        assert answer.json()["ok"], answer.text


async def test_a_draining_engine_gets_nothing_new(make_gateway: MakeGateway) -> None:
    async with run_engine() as one, run_engine() as two:
        gateway = await start(make_gateway, one, two)
        await one.call_admin("POST", "/drain")
        async with connect(gateway) as client:
            for _ in range(6):
                answer = await client.completions.create(model=MODEL, prompt="x", max_tokens=1)
                assert answer.choices
        await gateway.until_routable(1, MODEL)
