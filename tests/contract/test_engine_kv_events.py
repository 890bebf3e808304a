"""KV events from engine to gateway: what one encodes the other decodes, over the engine's own cache events."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import zmq
import zmq.asyncio
from tests.support.engine_server import Running, Setup, run_engine

from millpond_common.contract import headers, kv_events
from millpond_common.contract.blockkey import KeyScope, compute_block_keys, make_namespace
from millpond_gateway.routing.kvevents import Cleared, Heartbeat, Removed, Stored, Tier, decode_batch

PROMPT = "the quick brown fox jumps over the lazy dog " * 4


async def collect(engine: Running, seconds: float, action: Any) -> list[Any]:
    """Events that an action causes, as the gateway decodes them."""
    publisher = engine.context.events
    assert publisher is not None
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(publisher.endpoint)
    await asyncio.sleep(0.2)
    await action()
    events: list[Any] = []
    try:
        async with asyncio.timeout(seconds):
            while True:
                _, _, payload = await socket.recv_multipart()
                batch = decode_batch(payload)
                assert batch.num_bad == 0
                assert batch.epoch == engine.context.epoch
                events += batch.events
    except TimeoutError:
        return events
    finally:
        context.destroy(linger=0)


async def test_the_gateway_computes_the_keys_the_engine_publishes() -> None:
    async with run_engine(Setup(events=True)) as engine:

        async def ask() -> None:
            body = {"prompt": PROMPT, "max_tokens": 1, "cache_salt": "s"}
            await engine.post("/v1/completions", body, **{headers.TENANT: "acme"})

        events = await collect(engine, 1.5, ask)
        stored = [event for event in events if isinstance(event, Stored)]
        hashes = [value for event in stored for value in event.hashes]
        scope = KeyScope("fake", 16, 0, "", make_namespace("acme", "s"))
        assert hashes == compute_block_keys(scope, list(PROMPT.encode()))
        assert {(event.tokens, event.namespace) for event in stored} == {((), "")}, "prompts and salts stay"
        assert {(event.tier, event.scheme, event.block_tokens) for event in stored} == {(Tier.DEVICE, 1, 16)}
        assert any(isinstance(event, Heartbeat) for event in events)


async def test_evictions_and_resets_reach_the_gateway() -> None:
    async with run_engine(Setup(events=True, num_blocks=14, max_model_tokens=200)) as engine:

        async def churn() -> None:
            for number in range(4):
                await engine.complete(prompt=f"{number}" * 160, max_tokens=2)
            await engine.settle()
            await engine.call_admin("POST", "/reset_prefix_cache")

        events = await collect(engine, 1.0, churn)
        resident: set[int] = set()
        for event in events:
            if isinstance(event, Stored):
                resident.update(event.hashes)
            elif isinstance(event, Removed):
                assert resident.issuperset(event.hashes)
                resident.difference_update(event.hashes)
            elif isinstance(event, Cleared):
                resident.clear()
        assert any(isinstance(event, Removed) for event in events)
        assert not resident


async def test_a_reset_of_an_idle_engine_is_told_at_once_and_once() -> None:
    async with run_engine(Setup(events=True)) as engine:

        async def reset_between() -> None:
            await engine.complete(prompt="before" * 20, max_tokens=2)
            await engine.settle()
            await engine.call_admin("POST", "/reset_prefix_cache")
            await asyncio.sleep(0.3)
            await engine.complete(prompt="after" * 20, max_tokens=2)

        events = await collect(engine, 1.5, reset_between)
        told = [type(event) for event in events if isinstance(event, Stored | Cleared)]
        assert told == [Stored, Cleared, Stored]


@pytest.mark.parametrize("form", ["map", "array"])
def test_both_forms_decode_to_the_same_blocks(form: kv_events.Form) -> None:
    event = kv_events.StoredBlocks(
        keys=(5, 6), parent=4, tokens=list(range(8)), block_tokens=4, adapter="sql", namespace="acme"
    )
    removed = kv_events.RemovedBlocks((5,))
    payload = kv_events.encode_batch(
        [event, removed, kv_events.ClearedBlocks()], kv_events.EventStamp("0a", 2, 1), seconds=1.0, form=form
    )
    stored, gone, cleared = decode_batch(payload).events
    assert isinstance(stored, Stored)
    assert (stored.hashes, stored.parent) == ((5, 6), 4)
    assert stored.tokens == (tuple(range(8)) if form == "array" else ())
    assert (stored.adapter, stored.block_tokens, stored.tier) == ("sql", 4, Tier.DEVICE)
    assert isinstance(gone, Removed)
    assert gone.hashes == (5,)
    assert isinstance(cleared, Cleared)
