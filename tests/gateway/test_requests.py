"""What clients may send: refused, bounded, or passed on; with the right answer each time."""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest
from tests.fixtures.gateway import MODEL, MakeEngine, MakeGateway, Script
from tests.gateway.wire import BODY, STREAM_BODY, ask, make_request, parse, talk

SMUGGLING = {
    "length and chunked": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "same length twice": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "length with sign": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: +5\r\n\r\nhello",
    "length list": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5, 5\r\n\r\nhello",
    "chunked twice": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "unknown coding": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "coding with tab": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "space before colon": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length : 5\r\n\r\nhello",
    "folded header": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-A: b\r\n c\r\nContent-Length: 0\r\n\r\n",
    "bare line feed": b"POST /v1/completions HTTP/1.1\nHost: a\nContent-Length: 0\n\n",
    "two hosts": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nHost: b\r\nContent-Length: 0\r\n\r\n",
    "no host": b"POST /v1/completions HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
    "bad chunk size": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    "chunk longer than said": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabcd\r\n0\r\n\r\n",
    "null in a header": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-A: b\x00c\r\nContent-Length: 0\r\n\r\n",
    "old chunked": b"POST /v1/completions HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "not http": b"\x16\x03\x01\x02\x00\x01\x00",
    "http/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "unknown version": b"POST /v1/completions HTTP/3.7\r\nHost: a\r\n\r\n",
    "relative target": b"GET v1/models HTTP/1.1\r\nHost: a\r\n\r\n",
}


@pytest.mark.parametrize("name", SMUGGLING)
async def test_what_could_be_read_two_ways_is_refused_and_reaches_no_engine(
    name: str, make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine()
    gateway = await make_gateway(engine)
    answer = await ask(gateway, SMUGGLING[name])
    assert answer.status == 400
    assert answer.closed
    assert engine.seen == []


@pytest.mark.parametrize(
    ("request_bytes", "status", "code"),
    [
        (make_request(b"{", framing="Content-Length: 1"), 400, "invalid_value"),
        (make_request(b"[]"), 400, "invalid_value"),
        (make_request(b'{"model": 5}'), 400, "invalid_value"),
        (make_request(b'{"model": "tiny", "stream": "yes"}'), 400, "invalid_value"),
        (make_request(b'{"prompt": "x"}'), 400, "invalid_value"),
        (make_request(b'{"model": "other", "prompt": "x"}'), 404, "model_not_found"),
        (make_request(BODY, extra=("Content-Encoding: gzip",)), 415, "unsupported_media_type"),
        (make_request(BODY, path="/v1/nothing"), 404, "not_found"),
        (make_request(BODY, path="/v1/models"), 405, "method_not_allowed"),
        (make_request(b"", path="/v1/completions", method="GET"), 405, "method_not_allowed"),
        (make_request(b"", path="/v1/completions", method="DELETE"), 405, "method_not_allowed"),
        (make_request(b"", path="/v1/models/nobody", method="GET"), 404, "model_not_found"),
        (make_request(BODY, extra=("Expect: 200-ok",)), 400, "invalid_value"),
        (make_request(BODY, extra=("X-Long: " + "a" * 40_000,)), 431, "head_too_large"),
        (make_request(BODY, extra=tuple(f"X-{n}: a" for n in range(200))), 431, "head_too_large"),
        (make_request(BODY, path="/v1/" + "a" * 10_000), 431, "head_too_large"),
    ],
)
async def test_gw_112_bad_requests_get_their_status_in_openai_shape(
    request_bytes: bytes, status: int, code: str, make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    gateway = await make_gateway(await make_engine())
    answer = await ask(gateway, request_bytes)
    assert (answer.status, answer.code) == (status, code)
    assert answer.find("x-millpond-reason") == [code]
    assert answer.find("server") == ["millpond-gateway"]
    assert len(answer.find("x-request-id")) == 1


async def test_an_unknown_model_is_told_which_there_are(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    gateway = await make_gateway(await make_engine())
    answer = await ask(gateway, make_request(b'{"model": "other", "prompt": "x"}'))
    assert MODEL in json.loads(answer.body)["error"]["message"]


async def test_another_content_type_is_refused_and_parameters_of_json_are_not(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    gateway = await make_gateway(await make_engine())
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        for media, status in {
            "text/plain": 400,
            "application/json; charset=utf-8": 200,
            "Application/JSON": 200,
        }.items():
            answer = await client.post("/v1/completions", content=BODY, headers={"content-type": media})
            assert answer.status_code == status, media


async def test_gw_103_gw_104_bodies_of_any_usual_size_are_accepted(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine()
    gateway = await make_gateway(engine)
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        for size in (33_000, 129_000, 640_000, 33_000_000):
            answer = await client.post(
                "/v1/completions", json={"model": MODEL, "prompt": "x" * size}, timeout=30
            )
            assert answer.status_code == 200
            assert len(engine.seen[-1].body) > size
    assert gateway.process.relay.buffered_bytes == 0


async def test_gw_102_a_body_over_the_limit_is_413_whether_announced_or_not(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine()
    gateway = await make_gateway(engine, max_body_bytes=1000)
    announced = await ask(gateway, make_request(b"", framing="Content-Length: 1001"))
    chunked = make_request(b"", framing="Transfer-Encoding: chunked") + b"400\r\n" + b"x" * 1024 + b"\r\n"
    unannounced = await ask(gateway, chunked)
    assert [announced.status, unannounced.status] == [413, 413]
    assert announced.closed
    assert engine.seen == []
    assert gateway.process.relay.buffered_bytes == 0


async def test_all_bodies_together_are_bounded(make_engine: MakeEngine, make_gateway: MakeGateway) -> None:
    gateway = await make_gateway(await make_engine(), max_buffered_body_bytes=5000)
    first = asyncio.create_task(
        talk(gateway, make_request(b"x", framing="Content-Length: 4000"), seconds=1.5)
    )
    async with asyncio.timeout(20):
        while not gateway.process.relay.buffered_bytes:
            await asyncio.sleep(0.01)
    second = await ask(gateway, make_request(b"x", framing="Content-Length: 4000"))
    assert (second.status, second.code) == (503, "overloaded")
    assert second.find("retry-after") == ["1"]
    await first
    async with asyncio.timeout(20):
        while gateway.process.relay.buffered_bytes:
            await asyncio.sleep(0.01)


async def test_gw_043_past_the_connection_limit_503_comes_before_anything_is_read(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine()
    gateway = await make_gateway(engine, max_connections=3)
    idle = [await asyncio.open_connection("127.0.0.1", gateway.process.port) for _ in range(3)]
    await asyncio.sleep(0.05)
    answer = await ask(gateway, b"POST")
    assert (answer.status, answer.code) == (503, "overloaded")
    assert answer.find("retry-after")
    for _, writer in idle:
        writer.close()
    await asyncio.sleep(0.1)
    assert (await ask(gateway, make_request())).status == 200


async def test_open_requests_are_bounded_before_their_body_is_read(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    gate = asyncio.Event()
    engine = await make_engine(script=Script(gate=gate))
    gateway = await make_gateway(engine, max_requests=2)
    running = [asyncio.create_task(talk(gateway, make_request())) for _ in range(2)]
    async with asyncio.timeout(20):
        while engine.num_open < 2:
            await asyncio.sleep(0.01)
    answer = await ask(gateway, make_request(b"", framing="Content-Length: 100"))
    assert answer.status == 503
    gate.set()
    assert all(parse(received).status == 200 for received in await asyncio.gather(*running))


async def test_expect_continue_is_answered_before_the_body(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    gateway = await make_gateway(await make_engine())
    head = make_request(b"", framing=f"Content-Length: {len(BODY)}", extra=("Expect: 100-continue",))
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.process.port)
    writer.write(head)
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(BODY)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_expect_continue_is_refused_without_the_body(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    gateway = await make_gateway(await make_engine(), max_body_bytes=10)
    answer = await ask(
        gateway, make_request(b"", framing="Content-Length: 100", extra=("Expect: 100-continue",))
    )
    assert answer.status == 413


async def test_a_pipelined_request_is_not_run_and_the_connection_ends(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine()
    gateway = await make_gateway(engine)
    received = await talk(gateway, make_request() * 3)
    assert received.count(b"HTTP/1.1 200") == 1
    assert len(engine.seen) == 1
    engine.script.chunk_seconds = 0.05
    later = await talk(gateway, make_request(STREAM_BODY), make_request(), pause=0.01)
    assert later.count(b"HTTP/1.1 ") == 1
    assert len(engine.seen) == 2


async def test_one_connection_serves_many_requests(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine()
    gateway = await make_gateway(engine)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.process.port)
    for _ in range(20):
        writer.write(make_request())
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await reader.readexactly(length)
    writer.close()
    assert len(engine.seen) == 20
    assert gateway.process.relay.connections.num_open <= 3


async def test_an_http_1_0_client_gets_its_stream_without_chunks(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    gateway = await make_gateway(await make_engine())
    received = await talk(gateway, make_request(STREAM_BODY, version="1.0"))
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")


async def test_an_absolute_target_and_an_ignored_upgrade_are_served(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine()
    gateway = await make_gateway(engine)
    absolute = await ask(gateway, make_request(path="http://gateway/v1/completions"))
    assert absolute.status == 200
    upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQ")
    split = make_request(extra=upgrade)
    assert (await ask(gateway, split)).status == 200
    assert (await ask(gateway, split[:-5], split[-5:], pause=0.02)).status == 200
    assert engine.seen[-1].body == BODY
    assert "upgrade" not in engine.seen[-1].headers


async def test_a_request_that_comes_byte_by_byte_is_served(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine()
    gateway = await make_gateway(engine)
    data = make_request(b"", framing="Transfer-Encoding: chunked") + b"%x\r\n%b\r\n0\r\n\r\n" % (
        len(BODY),
        BODY,
    )
    answer = await ask(gateway, *(data[at : at + 1] for at in range(len(data))))
    assert answer.status == 200
    assert engine.seen[0].body == BODY
    assert engine.seen[0].headers["content-length"] == str(len(BODY))


async def test_slow_heads_and_slow_bodies_time_out(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    gateway = await make_gateway(await make_engine(), head_seconds=0.1, body_seconds=0.1)
    head = await ask(gateway, b"POST /v1/comp")
    body = await ask(gateway, make_request(b"{", framing="Content-Length: 100"))
    assert [head.status, body.status] == [408, 408]
    assert gateway.process.relay.buffered_bytes == 0


async def test_an_idle_connection_is_closed(make_engine: MakeEngine, make_gateway: MakeGateway) -> None:
    gateway = await make_gateway(await make_engine(), client_idle_seconds=0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.process.port)
    async with asyncio.timeout(20):
        assert await reader.read() == b""
    writer.close()


async def test_gw_090_null_is_absent(make_engine: MakeEngine, make_gateway: MakeGateway) -> None:
    engine = await make_engine()
    gateway = await make_gateway(engine)
    body = json.dumps(
        {"model": MODEL, "prompt": "x", "stream": None, "logprobs": None, "max_tokens": None, "n": None}
    ).encode()
    answer = await ask(gateway, make_request(body))
    assert answer.status == 200
    assert answer.find("content-type") == ["application/json"]
    assert engine.seen[0].body == body


async def test_models_are_listed_and_found(make_engine: MakeEngine, make_gateway: MakeGateway) -> None:
    gateway = await make_gateway(await make_engine())
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as client:
        card = await client.models.retrieve(MODEL)
        assert card.owned_by == "millpond"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
    head = await talk(
        gateway, make_request(b"", path="/v1/models", method="HEAD", framing="X-A: b"), seconds=0.3
    )
    assert head.startswith(b"HTTP/1.1 200 ")
    assert head.endswith(b"\r\n\r\n")
