"""Engines that are not ours behind static addresses: their events, metrics and limits are used."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from tests.fixtures.gateway import MODEL, FakeEngine, MakeEngine, MakeGateway, Script
from tests.gateway.wire import ask, make_request

from millpond_gateway.app.foreign import ForeignFacts, read_foreign

VLLM_METRICS = """\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",cache_dtype="auto",num_gpu_blocks="2048",enable_prefix_caching="True"} 1.0
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.76e+09
"""
MODELS = json.dumps({"object": "list", "data": [{"id": MODEL, "max_model_len": 4096}]})
PROMPT = [5 + number % 90 for number in range(320)]


@asynccontextmanager
async def publish() -> AsyncIterator[tuple[int, Callable[[list[Any]], Any]]]:
    """A publisher of KV events as vLLM is one: its port, and a function that sends a batch."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.PUB)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    sequence = 0

    async def send(events: list[Any]) -> None:
        nonlocal sequence
        payload = msgspec.msgpack.encode([1.0, events, 0])
        await socket.send_multipart([b"kv-events", sequence.to_bytes(8, "big"), payload])
        sequence += 1

    try:
        yield port, send
    finally:
        socket.close(0)
        context.destroy(linger=0)


def make_foreign(**kwargs: Any) -> dict[str, Any]:
    return {
        "serves_state": False,
        "knows_requests": False,
        "pages": {"/metrics": VLLM_METRICS, "/v1/models": MODELS},
        **kwargs,
    }


def test_what_an_engine_tells_is_read_and_what_it_does_not_is_left_out() -> None:
    assert read_foreign(VLLM_METRICS, MODELS.encode()) == ForeignFacts(
        epoch="start-1.76e+09", block_tokens=32, num_blocks=2048, max_model_tokens=4096
    )
    assert read_foreign("", b"<html>") == ForeignFacts()
    assert read_foreign('vllm:cache_config_info{block_size="x"} 1', b'{"data":[{}]}') == ForeignFacts()


async def test_a_foreign_engine_serves_with_its_limits_known(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    gateway = await make_gateway(await make_engine(**make_foreign()))
    view = gateway.process.world.snapshot.endpoints[MODEL][0]
    assert (view.block_tokens, view.num_blocks, view.max_model_tokens) == (32, 2048, 4096)
    assert (await ask(gateway, make_request())).status == 200


async def test_an_engine_behind_a_path_is_asked_under_it_in_everything(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    """Two engines at one address, told apart by their paths alone."""
    engine = await make_engine(prefix="/llm/a", **make_foreign())
    gateway = await make_gateway(engine)
    view = gateway.process.world.snapshot.endpoints[MODEL][0]
    assert (view.address, view.prefix) == (engine.address, "/llm/a")
    assert (view.block_tokens, view.num_blocks, view.max_model_tokens) == (32, 2048, 4096)
    assert (await ask(gateway, make_request(path="/v1/completions?x=1"))).status == 200
    assert [seen.path for seen in engine.seen] == ["/v1/completions?x=1"]
    assert (await ask(gateway, make_request(path="/llm/a/v1/completions"))).status == 404


@pytest.mark.parametrize("as_map", [False, True], ids=["arrays", "maps"])
async def test_vllms_events_lead_requests_to_the_replica_that_holds_the_prefix(
    as_map: bool, make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    script = Script(
        num_chunks=1, prompt_tokens=320, cached_tokens=319
    )  # what it tells agrees with its events
    holder, other = [await make_engine(**make_foreign(script=script)) for _ in range(2)]
    async with publish() as (port, send):
        static = f"{MODEL}={holder.url}?events={port},{other.url}"
        gateway = await make_gateway(holder, other, options={"static": (static,)})
        index = gateway.process.fleet.pools[MODEL].router.index
        hashes = list(range(1000, 1010))
        if as_map:
            fields = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None}
            event: Any = {**fields, "token_ids": PROMPT, "block_size": 32, "medium": "GPU"}
        else:
            event = ["BlockStored", hashes, None, PROMPT, 32, None, "GPU"]
        await until_heard(holder, index, lambda: send([]))
        await send([event])
        async with asyncio.timeout(20):
            while not count_held(index, holder):
                await asyncio.sleep(0.01)
        assert count_held(index, holder) == 10
        body = json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 1}).encode()
        for _ in range(6):
            assert (await ask(gateway, make_request(body))).status == 200
        assert (len(holder.seen), len(other.seen)) == (6, 0)
        await send([["AllBlocksCleared"]])
        async with asyncio.timeout(20):
            while count_held(index, holder):
                await asyncio.sleep(0.01)


def count_held(index: Any, engine: FakeEngine) -> int:
    stream = index.find_stream(engine.address)
    return 0 if stream is None else int(stream.blocks.num_blocks)


async def until_heard(engine: FakeEngine, index: Any, send: Callable[[], Any]) -> None:
    """Until the subscription stands."""
    async with asyncio.timeout(20):
        while True:
            await send()
            await asyncio.sleep(0.02)
            stream = index.find_stream(engine.address)
            if stream is not None and stream.counts.num_batches:
                return
