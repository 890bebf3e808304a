"""What happens below the application: broken HTTP, half-closed connections, readers and writers that stall."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.support.engine_server import Running, Setup, run_engine

from millpond_engine.fake.cost import CostModel
from millpond_engine.server.limits import ServerLimits

BROKEN_HEADS = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    b"NONSENSE\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nno-colon\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: many\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -4\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\ncontent-length: 5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: x\r\nbad\x00name: y\r\n\r\n",
]
LONG_HEADS = [
    b"GET /" + b"a" * 50_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: x\r\nlong: " + b"a" * 50_000 + b"\r\n\r\n",
]
BROKEN_CHUNKS = [b"zz\r\n{}\r\n0\r\n\r\n", b"-1\r\n{}\r\n0\r\n\r\n", b"2\r\n{}XX0\r\n\r\n"]


@pytest.fixture
async def steady() -> AsyncIterator[Running]:
    """One token every 20 ms."""
    setup = Setup(cost=CostModel(decode_step_seconds=0.02), output_tokens=800)
    async with run_engine(setup) as running:
        yield running
        await running.settle()


async def connect(engine: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", engine.port)


async def read_all(reader: asyncio.StreamReader, seconds: float = 8.0) -> bytes:
    async with asyncio.timeout(seconds):
        return await reader.read()


async def exchange(engine: Running, data: bytes) -> bytes:
    reader, writer = await connect(engine)
    writer.write(data)
    try:
        return await read_all(reader)
    finally:
        writer.close()


def parse(raw: bytes) -> tuple[int, dict[str, str], bytes]:
    """The last answer of a connection; interim ones before it are skipped."""
    while True:
        head, _, rest = raw.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        status = int(first.split(" ")[1])
        if status >= 200:
            pairs = (line.split(": ", 1) for line in lines)
            return status, {name.lower(): value for name, value in pairs}, rest
        raw = rest


def make_request(body: dict[str, Any], version: str = "1.1") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


@pytest.mark.parametrize("head", BROKEN_HEADS, ids=lambda head: repr(head[:40]))
async def test_what_is_not_http_gets_an_openai_error(engine: Running, head: bytes) -> None:
    status, headers, body = parse(await exchange(engine, head))
    assert status == 400
    assert headers["content-type"].startswith("application/json")
    assert headers["x-millpond-epoch"] == engine.context.epoch
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("BadRequestError", "invalid_value")
    assert error["message"].startswith("the request is not valid HTTP/1.1")
    assert len(error["message"]) < 300


@pytest.mark.parametrize("head", LONG_HEADS, ids=["line", "field"])
async def test_a_head_that_is_too_long_is_a_431(engine: Running, head: bytes) -> None:
    status, _, body = parse(await exchange(engine, head))
    assert (status, json.loads(body)["error"]["code"]) == (431, "head_too_large")


@pytest.mark.parametrize("chunks", BROKEN_CHUNKS)
async def test_a_broken_chunk_is_a_400(engine: Running, chunks: bytes) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    raw = await exchange(engine, head + b"transfer-encoding: chunked\r\n\r\n" + chunks)
    status, _, body = parse(raw)
    assert (status, json.loads(body)["error"]["type"]) == (400, "BadRequestError")


async def test_an_unknown_expectation_is_no_plain_text(engine: Running) -> None:
    head = b"GET /health HTTP/1.1\r\nhost: x\r\nexpect: miracles\r\nconnection: close\r\n\r\n"
    status, headers, body = parse(await exchange(engine, head))
    assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_value")
    assert headers["content-type"].startswith("application/json")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_only_stops_sending_gets_its_answer(steady: Running, stream: bool) -> None:
    reader, writer = await connect(steady)
    writer.write(make_request({"prompt": "x", "max_tokens": 30, "stream": stream, "temperature": 0}))
    writer.write_eof()
    status, _, body = parse(await read_all(reader))
    assert status == 200
    assert b"[DONE]" in body if stream else json.loads(body)["usage"]["completion_tokens"] == 30
    writer.close()


async def test_a_client_that_stops_sending_in_mid_stream_gets_the_rest(steady: Running) -> None:
    reader, writer = await connect(steady)
    writer.write(make_request({"prompt": "x", "max_tokens": 30, "stream": True}))
    await reader.readuntil(b"data: ")
    writer.write_eof()
    assert (await read_all(reader)).count(b"[DONE]") == 1
    writer.close()


@pytest.mark.parametrize("path", [b"/health", b"/v1/models", b"/metrics"])
async def test_a_short_question_of_a_half_closed_client_is_answered(engine: Running, path: bytes) -> None:
    reader, writer = await connect(engine)
    writer.write(b"GET " + path + b" HTTP/1.1\r\nhost: x\r\n\r\n")
    writer.write_eof()
    assert parse(await read_all(reader, 2.0))[0] == 200
    writer.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_eng_067_a_client_that_stops_sending_and_then_leaves_is_noticed(
    steady: Running, stream: bool
) -> None:
    _, writer = await connect(steady)
    writer.write(make_request({"prompt": "x", "max_tokens": 700, "stream": stream}))
    await steady.wait_for(lambda: steady.context.thread.snapshot.counts.num_running == 1)
    writer.close()
    await steady.wait_for(lambda: steady.context.thread.snapshot.counts.num_running == 0, seconds=1.0)


async def test_a_client_that_stops_in_the_middle_of_its_body_is_let_go(engine: Running) -> None:
    reader, writer = await connect(engine)
    writer.write(make_request({"prompt": "x"})[:-3])
    writer.write_eof()
    assert await read_all(reader, 3.0) == b""
    writer.close()
    await engine.settle()


async def test_an_idle_connection_that_stops_sending_is_closed(engine: Running) -> None:
    reader, writer = await connect(engine)
    writer.write_eof()
    assert await read_all(reader, 2.0) == b""
    writer.close()


async def test_heads_and_bodies_that_never_end_are_bounded() -> None:
    limits = ServerLimits(body_seconds=0.3, idle_connection_seconds=0.5)
    async with run_engine(Setup(limits=limits)) as engine:
        reader, writer = await connect(engine)
        writer.write(make_request({"prompt": "x"})[:-3])
        status, _, body = parse(await read_all(reader, 5.0))
        assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
        writer.close()
        reader, writer = await connect(engine)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost:")
        assert await read_all(reader, 5.0) == b""
        writer.close()
        await engine.settle()


async def test_many_broken_connections_at_once_leave_the_engine_whole(steady: Running) -> None:
    whole = make_request({"prompt": "p" * 400, "max_tokens": 40, "stream": True})
    pieces = [*BROKEN_HEADS, *LONG_HEADS, whole[:50], whole[:-1], whole, b""]

    async def attack(number: int) -> None:
        reader, writer = await connect(steady)
        writer.write(pieces[number % len(pieces)])
        if number % 3 == 0 and writer.can_write_eof():
            writer.write_eof()
        await asyncio.sleep(0.01 * (number % 7))
        if number % 2:
            writer.transport.abort()
        else:
            writer.close()
        del reader

    await asyncio.gather(*[attack(number) for number in range(90)])
    answer = await steady.complete(prompt="still here", max_tokens=3)
    assert answer["usage"]["completion_tokens"] == 3
    await steady.settle()


async def test_garbage_on_many_connections_writes_few_lines(
    steady: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(30):
        assert parse(await exchange(steady, b"NONSENSE\r\n\r\n"))[0] == 400
    said = capsys.readouterr()
    assert (said.out + said.err).count("below the application") < 10
