"""Bad input of every kind at once, while others are served: typed answers, bounded waits, and every block back."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from tests.support.engine_server import Running, Setup, run_engine

from millpond_common.contract import headers
from millpond_common.contract.engine_config import SchedulingConfig, TenantConfig
from millpond_engine.fake.cost import CostModel
from millpond_engine.loop.thread import EngineThread
from millpond_engine.server.limits import ServerLimits

NUM_BLOCKS = 96
JSON = {"Content-Type": "application/json"}
HUGE = 10**40

BAD_BODIES: dict[str, Any] = {
    "oversized prompt": {"prompt": "p" * 5000},
    "oversized prompt of tokens": {"prompt": [7] * 5000},
    "prompt and limit beyond the context": {"prompt": "p" * 900, "max_tokens": 400},
    "more blocks than the pool": {"prompt": "p" * 600, "max_tokens": 400, "n": 16, "use_beam_search": True},
    "max_tokens 0": {"prompt": "x", "max_tokens": 0},
    "max_tokens -1": {"prompt": "x", "max_tokens": -1},
    "max_tokens huge": {"prompt": "x", "max_tokens": HUGE},
    "min_tokens above the limit": {"prompt": "x", "max_tokens": 2, "min_tokens": 3},
    "n huge": {"prompt": "x", "n": HUGE},
    "n 0": {"prompt": "x", "n": 0},
    "n negative": {"prompt": "x", "n": -3},
    "n true": {"prompt": "x", "n": True},
    "best_of below n": {"prompt": "x", "n": 3, "best_of": 2},
    "prompt of a wrong type": {"prompt": {"a": 1}},
    "prompts without end": {"prompt": ["x"] * 10_000},
    "token beyond the vocabulary": {"prompt": [10**9]},
    "negative token": {"prompt": [-1]},
    "token huge": {"prompt": [HUGE]},
    "temperature text": {"prompt": "x", "temperature": "hot"},
    "temperature huge": {"prompt": "x", "temperature": 1e300},
    "stop of a wrong type": {"prompt": "x", "stop": [1]},
    "stops without end": {"prompt": "x", "stop": ["a"] * 500},
    "bias of nothing": {"prompt": "x", "logit_bias": {"-1": 1}},
    "bias huge": {"prompt": "x", "logit_bias": {"1": HUGE}},
    "seed huge": {"prompt": "x", "seed": HUGE},
    "priority huge": {"prompt": "x", "priority": HUGE},
    "salt without end": {"prompt": "x", "cache_salt": "s" * 5000},
    "unknown model": {"prompt": "x", "model": "m" * 5000},
    "known and unsupported": {"prompt": "x", "guided_json": {}},
    "stream of a wrong type": {"prompt": "x", "stream": "yes"},
}
BAD_BYTES: dict[str, bytes] = {
    "nothing": b"",
    "broken JSON": b'{"prompt": "x"',
    "two values": b'{"prompt": "x"}{"prompt": "y"}',
    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
    "cut UTF-8": b'{"prompt": "\xf0\x9f"}',
    "nested without end": b'{"prompt": ' + b"[" * 100_000,
    "a list": b"[1, 2]",
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "a control character": b'{"prompt": "a\x00b"}',
}


@pytest.fixture
async def busy() -> AsyncIterator[Running]:
    """A small pool under steps that take time; whole again after the test, to the last block."""
    setup = Setup(
        max_model_tokens=640,
        num_blocks=NUM_BLOCKS,
        num_host_blocks=32,
        scheduling=SchedulingConfig(
            max_sequences=16, max_batch_tokens=256, tenants=(TenantConfig(name="acme", max_concurrency=4),)
        ),
        limits=ServerLimits(body_seconds=0.5, idle_connection_seconds=2.0, slow_reader_seconds=0.5),
        cost=CostModel(decode_step_seconds=0.002),
        output_tokens=400,
    )
    async with run_engine(setup) as running:
        yield running
        await running.settle(10.0)
        await assert_whole(running)


async def assert_whole(engine: Running) -> None:
    """Every invariant holds, nothing is open, and without the cache each block is free."""
    await asyncio.wrap_future(engine.context.thread.call(_check))
    assert (await engine.call_admin("POST", "/reset_prefix_cache"))[1]["success"] is True
    counts = engine.context.thread.snapshot.counts
    assert (counts.free_blocks, counts.cached_blocks, counts.used_blocks) == (NUM_BLOCKS, 0, 0)
    assert (counts.used_host_blocks, counts.num_running, counts.num_waiting) == (0, 0, 0)
    assert counts.leaked_blocks == 0


def _check(thread: EngineThread) -> None:
    thread.engine.scheduler.check_integrity()


async def send(engine: Running, data: bytes, path: str = "/v1/completions") -> tuple[int, bytes]:
    timeout = aiohttp.ClientTimeout(total=10)
    async with engine.session.post(engine.url + path, data=data, headers=JSON, timeout=timeout) as response:
        return response.status, await response.read()


def check_refused(name: str, status: int, body: bytes) -> None:
    assert 400 <= status < 500, (name, status, body[:300])
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}, name
    assert error["code"], name
    assert len(error["message"]) < 2000, f"{name}: the message repeats what was sent"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", BAD_BODIES)
async def test_a_bad_value_is_a_typed_refusal(engine: Running, name: str, stream: bool) -> None:
    body = {"stream": stream, **BAD_BODIES[name]}
    if name == "more blocks than the pool":
        body["stream"] = False  # beams are not streamed, whatever their size
    started = time.monotonic()
    status, answer = await send(engine, json.dumps(body).encode())
    check_refused(name, status, answer)
    assert time.monotonic() - started < 5.0


@pytest.mark.parametrize("name", BAD_BYTES)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_bad_bytes_are_a_typed_refusal(engine: Running, path: str, name: str) -> None:
    check_refused(name, *await send(engine, BAD_BYTES[name], path))


async def test_everything_at_once_leaves_every_block_where_it_was(busy: Running) -> None:
    prompts = [f"question {number} " * 6 for number in range(12)]
    calm = [(await busy.complete(prompt=prompt, max_tokens=24))["choices"][0]["text"] for prompt in prompts]
    rng = random.Random(20)
    attacks = [bad_value(busy, name) for name in BAD_BODIES] + [bad_bytes(busy, name) for name in BAD_BYTES]
    attacks += [slow_reader(busy) for _ in range(4)] + [slow_writer(busy) for _ in range(4)]
    attacks += [half_open(busy, number) for number in range(8)] + [
        leaver(busy, number) for number in range(12)
    ]
    attacks += [crowd(busy, number) for number in range(6)]
    rng.shuffle(attacks)
    honest = [busy.complete(prompt=prompt, max_tokens=24) for prompt in prompts]
    async with asyncio.timeout(60):
        *answers, _ = await asyncio.gather(*honest, asyncio.gather(*attacks))
    assert [answer["choices"][0]["text"] for answer in answers] == calm


async def bad_value(engine: Running, name: str) -> None:
    check_refused(name, *await send(engine, json.dumps(BAD_BODIES[name]).encode()))


async def bad_bytes(engine: Running, name: str) -> None:
    check_refused(name, *await send(engine, BAD_BYTES[name]))


async def open_raw(engine: Running, body: dict[str, Any], missing: int = 0) -> tuple[Any, Any]:
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.port, limit=1024)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    writer.write(f"{head}\r\n\r\n".encode() + data[: len(data) - missing])
    return reader, writer


async def slow_reader(engine: Running) -> None:
    """Takes nothing of a long stream and stays."""
    reader, writer = await open_raw(
        engine, {"prompt": "s" * 30, "max_tokens": 400, "stream": True, "logprobs": 20}
    )
    reader._transport.pause_reading()
    await asyncio.sleep(2.0)
    writer.transport.abort()


async def slow_writer(engine: Running) -> None:
    """Promises a body and never ends it."""
    reader, writer = await open_raw(engine, {"prompt": "w" * 100}, missing=5)
    answer = await asyncio.wait_for(reader.read(), 8)
    assert b" 408 " in answer.split(b"\r\n", 1)[0]
    writer.close()


async def half_open(engine: Running, number: int) -> None:
    """Stops sending after the whole request, and reads the answer."""
    reader, writer = await open_raw(
        engine, {"prompt": f"h{number}" * 10, "max_tokens": 20, "stream": bool(number % 2)}
    )
    writer.write_eof()
    answer = b""
    while data := await asyncio.wait_for(reader.read(4096), 20):
        answer += data
    assert b"HTTP/1.1 200 OK" in answer
    assert b"completion_tokens" in answer or b"[DONE]" in answer
    writer.close()


async def leaver(engine: Running, number: int) -> None:
    """Goes without a word, early or late."""
    body = {
        "prompt": "l" * (10 + 40 * number),
        "max_tokens": 150,
        "stream": bool(number % 2),
        "n": 1 + number % 3,
    }
    _, writer = await open_raw(engine, body)
    await asyncio.sleep(0.02 * number)
    if number % 4:
        writer.transport.abort()
    else:
        writer.close()


async def crowd(engine: Running, number: int) -> None:
    """As many samples as the limits allow, of a tenant with a cap."""
    body = {"prompt": [f"c{number}{i}" for i in range(4)], "n": 8, "max_tokens": 6, "temperature": 1.0}
    status, answer = await engine.post("/v1/completions", body, **{headers.TENANT: "acme"})
    assert status == 200
    assert len(answer["choices"]) == 32
