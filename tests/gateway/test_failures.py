"""What happens to requests when replicas fail: repeated only on proof, never doubled, never falsely complete."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter

import httpx
import pytest
from tests.fixtures.gateway import MODEL, FakeEngine, MakeEngine, MakeGateway, RunningGateway, Script
from tests.gateway.wire import BODY, STREAM_BODY, ask, make_request, parse, talk


def count_finished(*engines: FakeEngine) -> Counter[str]:
    """Completed generations by request id."""
    return Counter(
        seen.headers["x-request-id"] for engine in engines for seen in engine.seen if seen.finished
    )


async def test_gw_030_a_killed_replica_loses_none_of_100_waiting_requests(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    victim, other = (
        await make_engine(script=Script(hang=True)),
        await make_engine(script=Script(first_seconds=1)),
    )
    gateway = await make_gateway(victim, other)
    waiting = [asyncio.create_task(talk(gateway, make_request())) for _ in range(100)]
    async with asyncio.timeout(20):
        while victim.num_open + other.num_open < 100:
            await asyncio.sleep(0.01)
    assert victim.num_open >= 30
    await victim.stop()
    answers = [parse(received) for received in await asyncio.gather(*waiting)]
    assert [answer.status for answer in answers] == [200] * 100
    finished = count_finished(victim, other)
    assert len(finished) == 100
    assert set(finished.values()) == {1}
    await gateway.until_idle()


async def test_gw_039_a_refused_connection_is_tried_elsewhere(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engines = [await make_engine(), await make_engine()]
    gateway = await make_gateway(*engines, options={"poll_seconds": 60.0})
    await engines[0].stop()
    statuses = [(await ask(gateway, make_request())).status for _ in range(10)]
    assert statuses == [200] * 10


async def test_gw_041_an_engine_that_read_the_body_and_broke_off_is_not_asked_twice(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engines = [await make_engine(script=Script(die_before_head=True)) for _ in range(2)]
    gateway = await make_gateway(*engines)
    answer = await ask(gateway, make_request())
    assert (answer.status, answer.code) == (502, "replica_failed")
    assert answer.find("x-millpond-reason") == ["ReplicaFailed"]
    assert sum(len(engine.seen) for engine in engines) == 1
    await gateway.until_idle()


async def test_gw_041_an_engine_that_denies_the_request_proves_that_another_may_have_it(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    broken = await make_engine(script=Script(die_before_head=True, forget=True))
    sound = await make_engine()
    gateway = await make_gateway(broken, sound)
    answers = [await ask(gateway, make_request()) for _ in range(6)]
    assert [answer.status for answer in answers] == [200] * 6
    assert len(broken.seen) >= 1
    assert set(count_finished(sound).values()) == {1}


async def test_an_engine_that_is_not_ours_and_breaks_off_is_not_asked_twice(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    foreign = [
        await make_engine(script=Script(die_before_head=True), serves_state=False, knows_requests=False)
        for _ in range(2)
    ]
    gateway = await make_gateway(*foreign)
    assert (await ask(gateway, make_request())).status == 502
    assert sum(len(engine.seen) for engine in foreign) == 1


async def test_a_restarted_process_gives_its_requests_to_others(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    restarted, other = (
        await make_engine(script=Script(hang=True)),
        await make_engine(script=Script(hang=True)),
    )
    gateway = await make_gateway(restarted, other, options={"poll_seconds": 60.0})
    waiting = [asyncio.create_task(talk(gateway, make_request(), seconds=10)) for _ in range(4)]
    async with asyncio.timeout(20):
        while restarted.num_open + other.num_open < 4:
            await asyncio.sleep(0.01)
    assert restarted.num_open
    lost = restarted.num_open
    restarted.script.hang = other.script.hang = False
    await restarted.restart()
    async with asyncio.timeout(20):
        while sum(task.done() for task in waiting) < lost:  # the answers, not only the engines' side of them
            await asyncio.sleep(0.01)
    for task in waiting:
        if not task.done():
            task.cancel()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert sum(isinstance(result, bytes) and parse(result).status == 200 for result in results) == lost


async def test_gw_035_an_overloaded_replica_is_load_and_not_a_fault(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    busy, idle = (
        await make_engine(script=Script(refuse=(503, "overloaded", "queue full"))),
        await make_engine(),
    )
    gateway = await make_gateway(busy, idle)
    statuses = [(await ask(gateway, make_request())).status for _ in range(20)]
    assert statuses == [200] * 20
    assert len(busy.seen) >= 3
    busy.script.refuse = None
    before = len(busy.seen)
    for _ in range(20):
        await ask(gateway, make_request())
    assert len(busy.seen) > before
    assert gateway.process.fleet.pools[MODEL].verdict.ejected == frozenset()


async def test_an_overload_of_every_replica_passes_unchanged(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engines = [await make_engine(script=Script(refuse=(503, "overloaded", "full"))) for _ in range(2)]
    gateway = await make_gateway(*engines)
    answer = await ask(gateway, make_request())
    assert (answer.status, answer.code) == (503, "overloaded")
    assert sum(len(engine.seen) for engine in engines) == 2
    await gateway.until_idle()


async def test_another_503_than_an_overload_is_not_repeated(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engines = [await make_engine(script=Script(refuse=(503, "engine_error", "broken"))) for _ in range(2)]
    gateway = await make_gateway(*engines)
    answer = await ask(gateway, make_request())
    assert (answer.status, answer.code) == (503, "engine_error")
    assert sum(len(engine.seen) for engine in engines) == 1


async def test_gw_034_client_errors_open_no_breaker(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine(script=Script(refuse=(400, "context_length_exceeded", "too long")))
    gateway = await make_gateway(engine)
    for _ in range(20):
        assert (await ask(gateway, make_request())).status == 400
    engine.script.refuse = None
    assert (await ask(gateway, make_request())).status == 200


async def test_gw_036_one_client_that_provokes_errors_ejects_nobody(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine, other = (
        await make_engine(script=Script(refuse=(500, "engine_error", "broken"))),
        await make_engine(),
    )
    other.script.refuse = engine.script.refuse
    gateway = await make_gateway(engine, other)
    for _ in range(78):
        assert (await ask(gateway, make_request())).status == 500
    engine.script.refuse = other.script.refuse = None
    statuses = [(await ask(gateway, make_request())).status for _ in range(10)]
    assert statuses == [200] * 10


async def test_gw_038_an_endpoint_that_never_answers_slows_nobody_else(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    hanging = await make_engine(script=Script(hang=True))
    sound = [await make_engine() for _ in range(3)]
    gateway = await make_gateway(hanging, *sound, first_byte_seconds=2.0)
    loop = asyncio.get_running_loop()

    async def measure() -> tuple[int, float]:
        began = loop.time()
        return (await ask(gateway, make_request())).status, loop.time() - began

    results = await asyncio.gather(*(measure() for _ in range(40)))
    late = [seconds for status, seconds in results if status == 504]
    good = [seconds for status, seconds in results if status == 200]
    assert late
    assert len(late) + len(good) == 40
    assert min(late) >= 2.0
    assert max(good) < 2.0
    async with asyncio.timeout(20):
        while hanging.num_open:
            await asyncio.sleep(0.01)
    await gateway.until_idle()


async def test_idle_and_total_deadlines_end_a_stream_with_an_error(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine(script=Script(num_chunks=100, chunk_seconds=0.3))
    for setting, reason in {"idle_seconds": "stood still", "total_seconds": "no complete answer"}.items():
        gateway = await make_gateway(engine, **{setting: 0.2})
        received = await talk(gateway, make_request(STREAM_BODY))
        assert b"event: error" in received
        assert reason.encode() in received
        assert b"deadline_exceeded" in received
        assert b"[DONE]" not in received
        assert not received.endswith(b"0\r\n\r\n")


async def test_gw_055_a_break_before_the_first_token_releases_once(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine(script=Script(die_before_head=True, first_seconds=0.05))
    gateway = await make_gateway(engine)
    answers = await asyncio.gather(*(ask(gateway, make_request()) for _ in range(30)))
    assert {answer.status for answer in answers} == {502}
    await gateway.until_idle()
    assert gateway.process.relay.buffered_bytes == 0


async def test_gw_056_an_error_and_a_leaving_client_in_one_instant_release_once(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine(script=Script(num_chunks=10, chunk_seconds=0.01, die_after_chunks=5))
    gateway = await make_gateway(engine)

    async def leave(delay: float) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.process.port)
        writer.write(make_request(STREAM_BODY))
        await asyncio.sleep(delay)
        writer.transport.abort()

    await asyncio.gather(*(leave(0.02 + 0.003 * number) for number in range(40)))
    await gateway.until_idle()
    await asyncio.wait_for(gateway.process.relay.deserted.wait(), 5)
    assert gateway.process.relay.buffered_bytes == 0


async def test_gw_054_counters_equal_the_truth_after_random_aborts(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engines = [await make_engine(script=Script(num_chunks=4, chunk_seconds=0.004)) for _ in range(3)]
    gateway = await make_gateway(*engines)
    random_delays = random.Random(5)

    async def run(delay: float) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.process.port)
        writer.write(make_request(random_delays.choice([BODY, STREAM_BODY])))
        await asyncio.sleep(delay)
        writer.transport.abort()

    for _ in range(10):
        await asyncio.gather(*(run(random_delays.uniform(0, 0.05)) for _ in range(50)))
    await gateway.until_idle()
    relay = gateway.process.relay
    await asyncio.wait_for(relay.deserted.wait(), 5)
    assert (relay.num_requests, relay.num_clients, relay.buffered_bytes) == (0, 0, 0)
    async with asyncio.timeout(20):
        while sum(engine.num_open for engine in engines):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "raw",
    [
        b"not http at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * 200_000 + b"\r\n\r\n",
    ],
)
async def test_an_answer_that_is_no_http_is_502(
    raw: bytes, make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    gateway = await make_gateway(await make_engine(script=Script(raw=raw)))
    assert (await ask(gateway, make_request())).status == 502
    await gateway.until_idle()


async def test_a_second_answer_on_a_connection_reaches_nobody(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    one = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
    gateway = await make_gateway(await make_engine(script=Script(raw=one + one)))
    received = await talk(gateway, make_request())
    assert received.count(b"HTTP/1.1 ") <= 1
    await gateway.until_idle()


async def test_an_answer_without_length_ends_with_its_connection(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    raw = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{}"
    engine = await make_engine(script=Script(raw=raw))
    gateway = await make_gateway(engine)
    answer = await ask(gateway, make_request())
    assert (answer.status, answer.body) == (200, b"2\r\n{}\r\n0\r\n\r\n")


async def test_a_plain_answer_that_breaks_off_ends_as_an_incomplete_transfer(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    gateway = await make_gateway(await make_engine(script=Script(die_after_chunks=1)))
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.TransportError):
            await client.post(
                f"{gateway.url}/v1/completions", content=BODY, headers={"content-type": "application/json"}
            )


async def test_a_stream_cut_inside_an_event_breaks_without_a_torn_error_event(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    gateway = await make_gateway(
        await make_engine(script=Script(num_chunks=9, die_after_chunks=3, die_mid_event=True)),
        hidden_usage=False,
    )
    received = await talk(gateway, make_request(STREAM_BODY))
    assert b"event: error" not in received
    assert b"[DONE]" not in received
    assert not received.endswith(b"0\r\n\r\n")


async def test_half_an_event_that_was_kept_back_leaves_room_for_the_error_event(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    gateway = await make_gateway(
        await make_engine(script=Script(num_chunks=9, die_after_chunks=3, die_mid_event=True))
    )
    received = await talk(gateway, make_request(STREAM_BODY))
    events = [piece for piece in received.split(b"\n\n") if b"data: " in piece]
    assert len(events) == 4
    assert b"event: error\ndata: " in events[3]
    assert b"[DONE]" not in received
    assert not received.endswith(b"0\r\n\r\n")


async def test_a_stream_that_ends_without_done_is_not_complete(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    gateway = await make_gateway(await make_engine(script=Script(finish=False)))
    received = await talk(gateway, make_request(STREAM_BODY))
    assert b"event: error" in received
    assert not received.endswith(b"0\r\n\r\n")


async def test_gw_114_a_kept_connection_that_closed_is_replaced_unseen(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine(serves_state=False)
    gateway = await make_gateway(engine, options={"poll_seconds": 60.0})
    assert gateway.process.relay.settings.engine_idle_seconds < 5.0
    assert (await ask(gateway, make_request())).status == 200
    # The engine closes while its next request is on the way: no byte is acknowledged before the end.
    for round_number in range(20):
        writers = list(engine._writers)
        task = asyncio.create_task(talk(gateway, make_request()))
        for writer in writers:
            if round_number % 2:
                await asyncio.sleep(0)
            writer.close()
        assert parse(await task).status == 200
    assert set(count_finished(engine).values()) == {1}


async def test_gw_115_an_engine_with_a_short_keep_alive_costs_no_request(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engines = [await make_engine(keep_alive_seconds=0.15) for _ in range(2)]
    gateway = await make_gateway(*engines)
    pauses = random.Random(3)

    async def run() -> list[int]:
        statuses = []
        for _ in range(15):
            statuses.append((await ask(gateway, make_request())).status)
            await asyncio.sleep(pauses.uniform(0.0, 0.3))
        return statuses

    results = await asyncio.gather(*(run() for _ in range(8)))
    assert Counter(status for statuses in results for status in statuses) == {200: 120}
    assert set(count_finished(*engines).values()) == {1}


async def test_gw_053_a_leaving_client_aborts_in_every_phase(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine(script=Script(hang=True))
    gateway = await make_gateway(engine)
    for body in (BODY, STREAM_BODY, json.dumps({"model": MODEL, "messages": []}).encode()):
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.process.port)
        writer.write(make_request(body))
        await until_open(engine, 1)
        writer.close()
        await until_open(engine, 0)
    await assert_quiet(gateway)


async def until_open(engine: FakeEngine, count: int) -> None:
    async with asyncio.timeout(20):
        while engine.num_open != count:
            await asyncio.sleep(0.005)


async def assert_quiet(gateway: RunningGateway) -> None:
    await gateway.until_idle()
    assert gateway.count_reserved() == 0
