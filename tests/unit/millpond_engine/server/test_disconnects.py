"""Clients that leave, wherever their request is: the engine stops within a step and the pool is whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import structlog.testing
from tests.support.engine_server import Running, Setup, run_engine

from millpond_common.contract.engine_config import SchedulingConfig
from millpond_engine.fake.cost import CostModel
from millpond_engine.server.limits import ServerLimits


@pytest.fixture
async def slow() -> AsyncIterator[Running]:
    """One sequence at a time, 10 ms a step, prompts at 2,000 tokens/s in chunks of 64."""
    setup = Setup(
        max_model_tokens=2048,
        num_blocks=300,
        output_tokens=2000,
        scheduling=SchedulingConfig(max_sequences=1, max_batch_tokens=64),
        cost=CostModel(decode_step_seconds=0.01, prefill_tokens_per_second=2000),
    )
    async with run_engine(setup) as running:
        yield running
        await running.settle()


async def open_request(
    engine: Running, body: dict[str, Any]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A raw connection, so that the test decides how it ends."""
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    writer.write(f"{head}\r\n\r\n".encode() + data)
    await writer.drain()
    return reader, writer


def count_outcomes(engine: Running) -> dict[str, float]:
    cells = engine.context.thread.recorder.own.counters["requests_total"].values
    totals: dict[str, float] = {}
    for labels, value in cells.items():
        totals[labels[2]] = totals.get(labels[2], 0.0) + value
    return totals


def is_running(engine: Running, number: int) -> bool:
    return engine.context.thread.snapshot.counts.num_running == number


@pytest.mark.parametrize("stream", [True, False], ids=["ENG-066-streamed", "ENG-067-whole"])
async def test_eng_066_067_leaving_in_decode_ends_the_sequence(slow: Running, stream: bool) -> None:
    _, writer = await open_request(slow, {"prompt": "x", "max_tokens": 1000, "stream": stream})
    await slow.wait_for(lambda: is_running(slow, 1))
    await asyncio.sleep(0.05)
    writer.close()
    await slow.wait_for(lambda: is_running(slow, 0), seconds=1.0)
    await slow.settle()
    assert count_outcomes(slow)["cancelled"] == 1


async def test_eng_065_leaving_in_mid_prefill_computes_no_further_chunk(slow: Running) -> None:
    _, writer = await open_request(slow, {"prompt": "p" * 2000, "max_tokens": 5, "stream": True})
    await slow.wait_for(lambda: is_running(slow, 1))
    await asyncio.sleep(0.1)
    writer.close()
    await slow.wait_for(lambda: is_running(slow, 0), seconds=1.0)
    steps = slow.context.thread.snapshot.num_steps
    await asyncio.sleep(0.1)
    assert slow.context.thread.snapshot.num_steps - steps <= 1
    assert slow.context.thread.snapshot.counts.waiting_tokens == 0
    tokens = slow.context.thread.recorder.vllm.histograms["iteration_tokens_total"].values[()][-1]
    assert tokens < 1500  # the rest of the prompt was never computed


async def test_eng_064_leaving_while_queued_leaves_the_queue(slow: Running) -> None:
    _, first = await open_request(slow, {"prompt": "a", "max_tokens": 200})
    await slow.wait_for(lambda: is_running(slow, 1))
    _, second = await open_request(slow, {"prompt": "b" * 100, "max_tokens": 200})
    await slow.wait_for(lambda: slow.context.thread.snapshot.counts.num_waiting == 1)
    second.close()
    await slow.wait_for(lambda: slow.context.thread.snapshot.counts.num_waiting == 0, seconds=1.0)
    assert is_running(slow, 1)
    first.close()
    await slow.wait_for(lambda: is_running(slow, 0), seconds=1.0)


async def test_eng_068_a_cut_stream_does_not_delay_the_next_request(slow: Running) -> None:
    reader, writer = await open_request(slow, {"prompt": "talk", "max_tokens": 1500, "stream": True})
    await reader.readuntil(b"data: ")
    writer.transport.abort()
    started = asyncio.get_running_loop().time()
    await slow.complete(prompt="talk", max_tokens=2)
    assert asyncio.get_running_loop().time() - started < 1.0


async def test_eng_034_leaving_around_the_last_token_frees_once(slow: Running) -> None:
    for wait in range(8):
        _, writer = await open_request(slow, {"prompt": "z", "max_tokens": 4, "stream": True})
        await asyncio.sleep(0.03 + wait * 0.004)
        writer.transport.abort()
    await slow.settle()
    assert sum(count_outcomes(slow).values()) == 8


async def test_a_reader_that_reads_nothing_is_cut_and_does_not_stop_the_others() -> None:
    setup = Setup(
        max_model_tokens=60_000,
        num_blocks=8000,
        output_tokens=50_000,
        check_kv=False,
        limits=ServerLimits(slow_reader_seconds=0.5),
        cost=CostModel(decode_step_seconds=0.0001),
    )
    async with run_engine(setup) as engine:
        body = {"prompt": "x", "max_tokens": 50_000, "stream": True, "logprobs": 20}
        reader, writer = await open_request(engine, body)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await engine.wait_for(lambda: is_running(engine, 1))
        answer = await engine.complete(prompt="other", max_tokens=20)
        assert answer["usage"]["completion_tokens"] == 20
        await engine.wait_for(lambda: is_running(engine, 0), seconds=20)
        await engine.settle()
        assert count_outcomes(engine)["cancelled"] == 1
        writer.close()


async def test_a_reader_too_far_behind_is_ended_by_the_loop() -> None:
    limits = ServerLimits(max_unread_tokens=200, slow_reader_seconds=30)
    setup = Setup(
        max_model_tokens=60_000, num_blocks=8000, output_tokens=50_000, check_kv=False, limits=limits
    )
    async with run_engine(setup) as engine:
        body = {"prompt": "x", "max_tokens": 50_000, "stream": True, "logprobs": 20}
        reader, writer = await open_request(engine, body)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        # Its end is waited for, not its run, which may be over between two looks.
        await engine.wait_for(lambda: sum(count_outcomes(engine).values()) == 1, seconds=25)
        assert is_running(engine, 0)
        writer.transport.abort()
        await engine.settle()


async def test_a_failed_step_is_a_500_or_an_error_event_and_the_engine_goes_on() -> None:
    from millpond_engine.fake.cost import make_faults

    async with run_engine(Setup(faults=make_faults(failing=[1]))) as engine:
        status, answer = await engine.post("/v1/completions", {"prompt": "x"})
        assert (status, answer["error"]["code"]) == (500, "engine_error")
        assert (await engine.complete(prompt="x"))["usage"]["completion_tokens"] == 16
        await engine.settle()
    async with run_engine(Setup(faults=make_faults(failing=[5]))) as engine:
        stream = await engine.stream("/v1/completions", {"prompt": "x"})
        assert stream.status == 200
        assert not stream.done
        event, data = stream.messages[-1].split("\n")
        assert event == "event: error"
        assert json.loads(data.removeprefix("data: "))["error"]["code"] == "engine_error"
        await engine.settle()
        assert count_outcomes(engine)["error"] == 1


async def test_a_defect_ends_every_stream_and_health() -> None:
    from millpond_engine.fake.cost import make_faults

    async with run_engine(Setup(faults=make_faults(crashing=[4]))) as engine:
        streams = await asyncio.gather(
            *[engine.stream("/v1/completions", {"prompt": p, "max_tokens": 50}) for p in ("a", "b")]
        )
        assert not any(stream.done for stream in streams)
        assert all(b"engine failed" in stream.raw for stream in streams)
        assert (await engine.get("/health"))[0] == 503
        assert (await engine.get("/ready"))[0] == 503
        assert (await engine.state())["phase"] == "Failed"
        assert (await engine.post("/v1/completions", {"prompt": "x"}))[0] == 500
        assert (await engine.call_admin("POST", "/flush_cache"))[0] == 503
        assert await asyncio.wait_for(engine.server.wait(), 5) == 1


async def test_a_stuck_step_fails_health_and_recovers() -> None:
    from millpond_engine.fake.cost import make_faults
    from millpond_engine.loop.settings import LoopSettings

    setup = Setup(faults=make_faults(stalling=[3], stall_seconds=0.8), loop=LoopSettings(stuck_seconds=0.2))
    async with run_engine(setup) as engine:
        task = asyncio.create_task(engine.complete(prompt="x", max_tokens=5))
        await asyncio.sleep(0.5)
        status, text = await engine.get("/health")
        assert (status, "has not moved" in text) == (503, True)
        await task
        assert (await engine.get("/health"))[0] == 200


async def test_load_does_not_fail_health(slow: Running) -> None:
    writers = [(await open_request(slow, {"prompt": "q" * 500, "max_tokens": 50}))[1] for _ in range(20)]
    for _ in range(10):
        assert (await slow.get("/health"))[0] == 200
        assert (await slow.get("/ready"))[0] == 200
    for writer in writers:
        writer.close()


async def test_clients_that_leave_are_no_failures_in_the_log() -> None:
    setup = Setup(output_tokens=2000, max_model_tokens=2048, num_blocks=2000)
    with structlog.testing.capture_logs() as entries:
        async with run_engine(setup) as engine:
            for _ in range(10):
                body = {"prompt": "x", "max_tokens": 1900, "stream": True}
                opened = [await open_request(engine, body) for _ in range(6)]
                for reader, writer in opened:
                    await reader.readline()
                    writer.transport.abort()
            await engine.settle()
    assert [entry for entry in entries if entry["log_level"] not in ("info", "debug")] == []
