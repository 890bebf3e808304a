"""Streams and plain answers pass unchanged; what breaks is never taken for complete."""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest
from tests.fixtures.gateway import MODEL, MakeEngine, MakeGateway, Script

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": True}


async def test_a_stream_passes_byte_for_byte(make_engine: MakeEngine, make_gateway: MakeGateway) -> None:
    engine = await make_engine(script=Script(num_chunks=5))
    gateway = await make_gateway(engine)
    async with httpx.AsyncClient() as client:
        direct = await client.post(f"{engine.url}/v1/chat/completions", json=CHAT)
        relayed = await client.post(f"{gateway.url}/v1/chat/completions", json=CHAT)
    assert relayed.status_code == 200
    assert relayed.content == direct.content
    assert relayed.headers["content-type"] == "text/event-stream; charset=utf-8"
    await gateway.until_idle()


async def test_the_openai_client_streams_and_completes(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine()
    gateway = await make_gateway(engine)
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        models = await client.models.list()
        assert [model.id for model in models.data] == [MODEL]
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
        )
        texts = [chunk.choices[0].delta.content async for chunk in stream if chunk.choices]
        plain = await client.completions.create(model=MODEL, prompt="hi")
    assert texts == ["word ", "word ", "word "]
    assert plain.choices[0].text == "word word word "
    assert plain.usage is not None
    assert plain.usage.prompt_tokens == 11


async def test_gw_058_gw_059_a_reset_after_five_chunks_is_an_error_event_without_done(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine(script=Script(num_chunks=20, chunk_seconds=0.01, die_after_chunks=5))
    gateway = await make_gateway(engine)
    received = b""

    async def read() -> None:
        nonlocal received
        async with (
            httpx.AsyncClient() as client,
            client.stream("POST", f"{gateway.url}/v1/chat/completions", json=CHAT) as answer,
        ):
            async for data in answer.aiter_raw():
                received += data

    with pytest.raises(httpx.RemoteProtocolError):
        await read()
    assert received.count(b"word ") == 5
    assert b"[DONE]" not in received
    assert b'"finish_reason": "stop"' not in received
    last = received.split(b"\n\n")[-2]
    assert last.startswith(b"event: error\ndata: ")
    assert json.loads(last.partition(b"data: ")[2])["error"]["code"] == "replica_failed"
    await gateway.until_idle()
    assert len(engine.seen) == 1


async def test_gw_051_gw_052_a_client_that_leaves_frees_the_engine_within_a_second(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine(script=Script(num_chunks=1000, chunk_seconds=0.02))
    gateway = await make_gateway(engine)

    async def leave(stream: bool) -> None:
        async with httpx.AsyncClient() as client:
            request = client.post(f"{gateway.url}/v1/chat/completions", json={**CHAT, "stream": stream})
            task = asyncio.create_task(request)
            async with asyncio.timeout(10):
                while engine.max_open < 8:
                    await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    loop = asyncio.get_running_loop()
    await asyncio.gather(*(leave(stream) for stream in [True, False] * 4))
    left_at = loop.time()
    async with asyncio.timeout(1.0):
        while engine.num_open:
            await asyncio.sleep(0.01)
    assert loop.time() - left_at < 1.0
    assert len(engine.seen) == 8
    assert all(seen.aborted_at is not None for seen in engine.seen)
    await gateway.until_idle()
