"""KV events of the real engine, over real sockets, into the index."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import zmq
import zmq.asyncio
from tests.support.engine_server import Running, Setup, run_engine

from millpond_common.contract import kv_events as wire
from millpond_common.contract.blockkey import KeyScope, compute_block_keys
from millpond_gateway.app.events import EventReader
from millpond_gateway.routing.held import ReplicaBlocks
from millpond_gateway.routing.stream import EventStream


@asynccontextmanager
async def follow(live: str, replay: str, stream: EventStream) -> AsyncIterator[None]:
    context = zmq.asyncio.Context()
    clock = asyncio.get_running_loop().time
    task = asyncio.create_task(EventReader(context, stream, live=live, replay=replay, clock=clock).run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        context.destroy(linger=0)


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def make_stream() -> EventStream:
    return EventStream(ReplicaBlocks(model="fake", seed=0))


def find_addresses(engine: Running) -> tuple[str, str]:
    events = engine.context.events
    assert events is not None
    return events.endpoint, events.replay_endpoint


PROMPT = [5 + number % 90 for number in range(160)]
SCOPE = KeyScope(model="fake", block_tokens=16)


async def test_stored_blocks_are_known_and_a_late_reader_catches_up() -> None:
    async with run_engine(Setup(events=True)) as engine:
        early, late = make_stream(), make_stream()
        addresses = find_addresses(engine)
        async with follow(*addresses, early):
            await until(lambda: early.counts.num_batches > 0)  # the first heartbeat: subscribed
            await engine.complete(prompt=PROMPT, max_tokens=1)
            keys = compute_block_keys(SCOPE, PROMPT)
            await until(lambda: early.blocks.match(keys).num_blocks == 10)
            async with follow(*addresses, late):
                await until(lambda: late.synced and late.blocks.match(keys).num_blocks == 10)
        assert early.confidence(asyncio.get_running_loop().time()) > 0.9
        assert late.counts.num_gaps == 1  # it began in the middle and fetched the rest


async def test_gw_082_a_gap_is_replayed_before_the_live_batch_that_showed_it() -> None:
    context = zmq.asyncio.Context()
    publisher, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (publisher, router)]
    payloads = [wire.encode_batch([wire.StoredBlocks(keys=(n,), parent=None, tokens=list(range(16)), block_tokens=16)], wire.EventStamp("e", n, 0), seconds=0.0, form="map") for n in range(600)]  # fmt: skip
    stream = make_stream()
    try:
        async with follow(f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}", stream):

            async def send(sequence: int) -> None:
                await publisher.send_multipart([b"t", wire.encode_sequence(sequence), payloads[sequence]])

            for _ in range(200):  # until the subscription stands
                await send(0)
                await asyncio.sleep(0.01)
                if stream.counts.num_batches:
                    break
            await send(501)
            client, _, asked = await asyncio.wait_for(router.recv_multipart(), 5)
            assert int.from_bytes(asked, "big") == 1
            await send(502)
            for sequence in range(1, 502):
                shape = [b"t"] if sequence % 2 else []  # both forms of a replay
                await router.send_multipart(
                    [client, b"", *shape, wire.encode_sequence(sequence), payloads[sequence]]
                )
            await router.send_multipart([client, b"", b"t", wire.encode_sequence(wire.END_SEQUENCE), b""])
            await until(lambda: stream.counts.num_batches == 503)
            assert stream.synced
            await asyncio.sleep(0.05)
            assert stream.counts.num_batches == 503
    finally:
        publisher.close(0)
        router.close(0)
        context.destroy(linger=0)
