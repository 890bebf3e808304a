"""What newcomers met: trailers without end, half-closed connections, too few descriptors."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.fixtures.gateway import MakeEngine, MakeGateway, Script
from tests.gateway.wire import BODY, STREAM_BODY, ask, make_request, parse


@pytest.mark.parametrize("trailers", [200, 50_000])
async def test_trailers_are_bounded(
    trailers: int, make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine()
    gateway = await make_gateway(engine)
    chunked = make_request(b"", framing="Transfer-Encoding: chunked")
    body = b"%x\r\n%b\r\n0\r\n" % (len(BODY), BODY)
    few = await ask(gateway, chunked + body + b"X-Checksum: 1\r\n\r\n")
    assert few.status == 200
    many = await ask(gateway, chunked + body + b"X: 1\r\n" * trailers + b"\r\n")
    assert many.status == 431
    assert many.closed
    assert len(engine.seen) == 1
    assert gateway.process.relay.buffered_bytes == 0


@pytest.mark.parametrize("body", [BODY, STREAM_BODY], ids=["whole", "stream"])
@pytest.mark.parametrize("early", [True, False], ids=["before the answer", "during the answer"])
async def test_a_client_that_only_stops_sending_gets_its_whole_answer(
    body: bytes, early: bool, make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine(script=Script(num_chunks=4, first_seconds=0.2, chunk_seconds=0.1))
    gateway = await make_gateway(engine)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.process.port)
    writer.write(make_request(body))
    if not early:
        await asyncio.sleep(0.35)
    writer.write_eof()
    async with asyncio.timeout(20):
        received = await reader.read()
    answer = parse(received)
    assert answer.status == 200
    assert answer.closed or not early
    if body is STREAM_BODY:
        assert answer.body.endswith(b"0\r\n\r\n")
        assert b"[DONE]" in answer.body
    else:
        assert json.loads(answer.body)["usage"]["completion_tokens"] == 4
    assert engine.seen[0].finished
    writer.close()
    await gateway.until_idle()


@pytest.mark.parametrize("stream", [True, False])
async def test_gw_051_a_client_that_closes_is_told_from_one_that_stops_sending(
    stream: bool, make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine(script=Script(first_seconds=30))
    gateway = await make_gateway(engine)
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.process.port)
    writer.write(make_request(STREAM_BODY if stream else BODY))
    async with asyncio.timeout(20):
        while not engine.seen:
            await asyncio.sleep(0.01)
    began = asyncio.get_running_loop().time()
    writer.close()
    async with asyncio.timeout(20):
        while engine.num_open:
            await asyncio.sleep(0.01)
    assert engine.seen[0].aborted_at is not None
    assert engine.seen[0].aborted_at - began < 5, "the answer would have come after 30 s"
    await gateway.until_idle()


async def test_gw_043_without_descriptors_the_answer_is_503_before_the_body_is_read(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine()
    gateway = await make_gateway(engine)
    gateway.process.relay.max_sockets = gateway.process.relay.connections.num_open + 1
    head_only = make_request(b"", framing="Content-Length: 1000")
    answer = await ask(gateway, head_only)
    assert (answer.status, answer.code, answer.find("retry-after")) == (503, "overloaded", ["1"])
    assert engine.seen == []
    gateway.process.relay.max_sockets = 1000
    assert (await ask(gateway, make_request())).status == 200


async def test_gw_105_the_end_of_a_body_in_many_chunks_is_always_seen(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine()
    gateway = await make_gateway(engine)
    head = make_request(b"", framing="Transfer-Encoding: chunked")
    chunks = [b"%x\r\n%b\r\n" % (1, BODY[at : at + 1]) for at in range(len(BODY))]
    for parts in (
        [head, *chunks, b"0\r\n\r\n"],  # the end alone
        [head, *chunks[:-1], chunks[-1] + b"0\r\n\r\n"],  # the end with the last chunk
        [head + b"".join(chunks) + b"0\r\n", b"\r\n"],  # the end cut in two
    ):
        assert (await ask(gateway, *parts, pause=0.002)).status == 200
        assert engine.seen[-1].body == BODY
        assert engine.seen[-1].headers["content-length"] == str(len(BODY))


async def test_gw_106_a_body_that_grows_on_its_way_has_its_length_counted_anew(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine()
    gateway = await make_gateway(engine)
    for framing in (None, "Transfer-Encoding: chunked"):
        body = STREAM_BODY if framing is None else b"%x\r\n%b\r\n0\r\n\r\n" % (len(STREAM_BODY), STREAM_BODY)
        answer = await ask(gateway, make_request(body, framing=framing))
        assert answer.status == 200
        seen = engine.seen[-1]
        assert len(seen.body) > len(STREAM_BODY)
        assert seen.headers["content-length"] == str(len(seen.body))
        assert "transfer-encoding" not in seen.headers
