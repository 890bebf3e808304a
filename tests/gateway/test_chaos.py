"""Faults of every kind while streams run: none lost before its first byte, none doubled, none falsely complete."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import cycle

import pytest
from tests.fixtures.gateway import MODEL, FakeEngine, MakeEngine, MakeGateway, RunningGateway, Script
from tests.gateway.wire import make_request, talk

HEALTHY = Script(num_chunks=6, chunk_seconds=0.005, first_seconds=0.01)
PROMPT = "the same long beginning " * 40
Fault = Callable[[FakeEngine], Awaitable[None]]


async def kill(engine: FakeEngine) -> None:
    """Nothing listens for a while."""
    await engine.stop()
    await asyncio.sleep(0.05)
    await engine.restart()


async def hang(engine: FakeEngine) -> None:
    """Takes requests and says nothing, until somebody kills it."""
    engine.script = replace(HEALTHY, hang=True)
    await asyncio.sleep(0.1)
    await engine.stop()
    engine.script = HEALTHY
    await engine.restart()


async def slow(engine: FakeEngine) -> None:
    """Answers late and drips; no fault at all to a client that waits."""
    engine.script = replace(HEALTHY, first_seconds=0.15, chunk_seconds=0.03)
    await asyncio.sleep(0.15)
    engine.script = HEALTHY


async def reset_mid_stream(engine: FakeEngine) -> None:
    """Every stream breaks after two events, some inside an event."""
    engine.script = replace(HEALTHY, die_after_chunks=2, die_mid_event=engine.port % 2 == 0)
    await asyncio.sleep(0.06)
    engine.script = HEALTHY


async def restart(engine: FakeEngine) -> None:
    """A new process at once under the same address, its cache empty."""
    await engine.restart()


FAULTS: dict[str, Fault] = {
    "kill": kill,
    "hang": hang,
    "slow": slow,
    "reset mid-stream": reset_mid_stream,
    "restart": restart,
}


@pytest.mark.parametrize("kinds", [*([name] for name in FAULTS), list(FAULTS)], ids=" ".join)
async def test_chaos_loses_nothing_before_the_first_byte_doubles_nothing_and_completes_nothing_falsely(
    kinds: list[str], make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engines = [await make_engine(script=HEALTHY) for _ in range(4)]
    gateway = await make_gateway(*engines)
    done: Counter[str] = Counter()
    stop = asyncio.Event()
    worker = asyncio.create_task(break_things(engines, kinds, done, stop))
    verdicts: Counter[str] = Counter()
    async with asyncio.timeout(200):
        while min(done[kind] for kind in kinds) < 4 or verdicts.total() < 200:
            verdicts.update(await send_wave(gateway, 25))
    stop.set()
    await worker
    assert verdicts["false completion"] == 0
    assert verdicts["lost before the first byte"] == 0, verdicts
    assert verdicts["complete"] > verdicts.total() // 2, verdicts
    if kinds == ["reset mid-stream"]:
        assert verdicts["broken, and says so"] > 0, "no stream was hit"
    if kinds == ["slow"]:
        assert verdicts["complete"] == verdicts.total(), verdicts
    assert max(count_finished(engines).values()) == 1
    await gateway.until_idle()


async def test_a_restarted_replica_is_not_expected_to_hold_what_its_former_life_held(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine(script=HEALTHY)
    gateway = await make_gateway(engine)
    assert set(await send_wave(gateway, 3)) == {"complete"}
    router = gateway.process.fleet.pools[MODEL].router
    assert router.cached_tokens(engine.address)[0] > 0
    await engine.restart()
    async with asyncio.timeout(20):
        while router.cached_tokens(engine.address)[0]:
            await asyncio.sleep(0.01)


async def break_things(
    engines: list[FakeEngine], kinds: list[str], done: Counter[str], stop: asyncio.Event
) -> None:
    """One fault after another, each on a replica that chance names."""
    fate = random.Random(11)
    for kind in cycle(kinds):
        await asyncio.sleep(0.05)
        if stop.is_set():
            return
        await FAULTS[kind](fate.choice(engines))
        done[kind] += 1


async def send_wave(gateway: RunningGateway, count: int) -> list[str]:
    """Verdicts on `count` streams at once."""
    body = json.dumps({"model": MODEL, "prompt": PROMPT, "stream": True}).encode()
    received = await asyncio.gather(*(talk(gateway, make_request(body)) for _ in range(count)))
    return [judge(each) for each in received]


def judge(received: bytes) -> str:
    """What a client would make of a stream."""
    head, _, body = received.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        return "lost before the first byte"
    complete = b"data: [DONE]" in body and body.endswith(b"0\r\n\r\n")
    if not complete:
        return "broken, and says so"
    words = body.count(b"word ") == HEALTHY.num_chunks
    return "complete" if body.count(b'"finish_reason": "stop"') == 1 and words else "false completion"


def count_finished(engines: list[FakeEngine]) -> Counter[str]:
    """Completed generations by request id."""
    return Counter(
        seen.headers["x-request-id"] for engine in engines for seen in engine.seen if seen.finished
    )
