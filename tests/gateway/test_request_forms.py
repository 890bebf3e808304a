"""Targets, methods, framing and bodies in forms that another reader could take for something else."""

from __future__ import annotations

import json
from urllib.parse import quote

import msgspec
import pytest
from tests.fixtures.gateway import MakeEngine, MakeGateway
from tests.gateway.wire import BODY, Answer, ask, make_request, parse, talk

CLOSE = ("Connection: close",)
CHUNKED = "Transfer-Encoding: chunked"


def make_chunks(*chunks: bytes, end: bytes = b"0\r\n\r\n", extension: bytes = b"") -> bytes:
    return b"".join(b"%x%b\r\n%b\r\n" % (len(data), extension, data) for data in chunks) + end


@pytest.mark.parametrize(
    "target",
    [
        "//v1/completions",
        "/v1//completions",
        "/v1/%63ompletions",
        "/v1/../v1/completions",
        "/v1/./completions",
        "/v1/completions/",
        "/v1/completions%2f..%2f..%2fdrain",
        "/v1/completions/../../drain",
        "/v1/%2e%2e/drain",
        "/v1/completions;x=1",
        "/v1/completions#drain",
        "/V1/COMPLETIONS",
        "/drain",
        "/v1/state",
        "/metrics",
        "*",
        "http://engine?/v1/completions",
        "http://engine",
    ],
)
async def test_no_other_spelling_of_a_path_reaches_an_engine(
    make_engine: MakeEngine, make_gateway: MakeGateway, target: str
) -> None:
    engine = await make_engine()
    gateway = await make_gateway(engine)
    answer = await ask(gateway, make_request(path=target, extra=CLOSE))
    assert (answer.status, answer.code) == (404, "not_found")
    assert engine.seen == []


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("POST http:///v1/completions", 400),
        ("POST http://user@engine/v1/completions", 400),
        ("POST ftp://engine/v1/completions", 400),
        ("POST http://engine#/v1/completions", 400),
        ("POST engine:8000", 400),
        ("CONNECT engine:8000", 400),
        ("CONNECT /v1/completions", 405),
        ("GET /v1/completions", 405),
        ("HEAD /v1/completions", 405),
        ("OPTIONS /v1/completions", 405),
        ("TRACE /v1/completions", 405),
        ("OPTIONS *", 404),
        ("post /v1/completions", 400),
        ("PRI *", 400),
    ],
)
async def test_targets_and_methods_that_are_not_served(
    make_engine: MakeEngine, make_gateway: MakeGateway, line: str, status: int
) -> None:
    engine = await make_engine()
    gateway = await make_gateway(engine)
    method, _, path = line.partition(" ")
    answer = await ask(gateway, make_request(method=method, path=path, extra=CLOSE))
    assert answer.status == status
    assert bool(answer.body) is (method != "HEAD")
    if status == 405 and method != "CONNECT":
        assert answer.find("allow") == ["POST"]
    assert engine.seen == []


async def test_an_absolute_target_goes_on_as_its_path(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine()
    gateway = await make_gateway(engine)
    for target in ("http://evil/v1/completions?a=b", "HTTPS://evil:80/v1/completions?a=b"):
        assert (await ask(gateway, make_request(path=target, extra=CLOSE))).status == 200
    assert [seen.path for seen in engine.seen] == ["/v1/completions?a=b"] * 2
    assert {seen.headers["host"] for seen in engine.seen} == {engine.address}


@pytest.mark.parametrize(
    "framing",
    [
        "Content-Length: 36\r\nContent-Length: 36",
        "Content-Length: 36, 36",
        "Content-Length: +36",
        "Content-Length: 0x24",
        "Content-Length: -1",
        "Content-Length:",
        "Content-Length: 99999999999999999999",
        "Content-Length : 36",
        "Content-Length: 36\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked, identity",
        "Transfer-Encoding: identity",
        "Transfer-Encoding : chunked",
        "Transfer-Encoding: xchunked",
        "Content-Length: 36\r\n Transfer-Encoding: chunked",
        "Content-Length: 36\r\nX: a\r\n b",
        "Content-Length: 36\r\nX: a\nTransfer-Encoding: chunked",
        "Content-Length: 36\r\nX: a\x00b",
        "Content-Length: 36\r\n: b",
        "Content-Length: 36\r\nHost: b",
    ],
)
async def test_framing_with_two_readings_is_refused(
    make_engine: MakeEngine, make_gateway: MakeGateway, framing: str
) -> None:
    engine = await make_engine()
    gateway = await make_gateway(engine)
    answer = await ask(gateway, make_request(framing=framing, extra=CLOSE))
    assert answer.status == 400
    assert answer.closed
    assert engine.seen == []


@pytest.mark.parametrize(
    ("chunks", "status"),
    [
        (make_chunks(BODY), 200),
        (make_chunks(*(BODY[n : n + 1] for n in range(len(BODY)))), 200),
        (make_chunks(BODY, extension=b';a=b;c="d"', end=b"0;z\r\n\r\n"), 200),
        (make_chunks(BODY, end=b"0\r\nX-A: b\r\nHost: evil\r\n\r\n"), 200),
        (make_chunks(BODY, end=b"0\r\nContent-Length: 3\r\n\r\n"), 400),
        (make_chunks(BODY, extension=b";a=" + b"x" * 200_000), 400),
        (make_chunks(*(BODY[n : n + 1] for n in range(len(BODY))), extension=b";a=" + b"x" * 9000), 400),
        (make_chunks(BODY).replace(b"\r\n", b"\n"), 400),
        (b"-1\r\n" + make_chunks(BODY), 400),
        (b"0x24\r\n" + BODY + b"\r\n0\r\n\r\n", 400),
        (b"f" * 17 + b"\r\n" + make_chunks(BODY), 400),
        (b"2\r\n" + BODY + b"\r\n0\r\n\r\n", 400),
        (make_chunks(BODY, extension=b";\n"), 400),
    ],
)
async def test_chunks(make_engine: MakeEngine, make_gateway: MakeGateway, chunks: bytes, status: int) -> None:
    engine = await make_engine()
    gateway = await make_gateway(engine)
    answer = parse(await talk(gateway, make_request(b"", framing=CHUNKED, extra=CLOSE), chunks))
    assert answer.status == status
    assert [seen.body for seen in engine.seen] == [BODY] * (status == 200)
    if status == 200:  # trailers end here
        assert "x-a" not in engine.seen[0].headers
        assert engine.seen[0].headers["host"] == engine.address
    assert gateway.process.relay.buffered_bytes == 0


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"model":"other","prompt":"x","model":"tiny"}', 200),
        (b'{"model":"tiny","prompt":"x","model":"other"}', 404),
        (b'{"model":"tiny","prompt":"x","mod\\u0065l":"other"}', 404),
        (b'{"mod\\u0065l":"tiny","prompt":"x"}', 200),
        (b'\xef\xbb\xbf{"model":"tiny","prompt":"x"}', 400),
        ('{"model":"tiny","prompt":"x"}'.encode("utf-16"), 400),
        ('{"model":"tiny","prompt":"x"}'.encode("utf-16-le"), 400),
        ('{"model":"tiny","prompt":"x"}'.encode("utf-32"), 400),
        (b'{"model":"\\ud800","prompt":"x"}', 400),
        (b'{"model":"tiny","prompt":"x","cache_salt":"\\udc00"}', 400),
        (b'{"model":"tiny","prompt":"x","max_tokens":NaN}', 400),
        (b'{"model":"tiny","prompt":"x","max_tokens":1e999}', 400),
        (b'{"model":"tiny","prompt":"x","temperature":NaN}', 400),
        (b'{"model":"tiny","prompt":"x","temperature":-Infinity}', 400),
        (b'{"model":"tiny","prompt":"x","stream":"true"}', 400),
        (b'{"model":"tiny","prompt":"x","stream":1}', 400),
        (b'{"model":5,"prompt":"x"}', 400),
        (b'{"model":"tiny","prompt":"x"}{}', 400),
        (b"[]", 400),
        (b"", 400),
        (b'{"model":"tiny","prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
        (b'{"model":"tiny","x":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}", 400),
        (b'{"model":"a\\r\\nx-evil: 1","prompt":"x"}', 404),
        (b'{"model":"' + b"a" * 100_000 + b'","prompt":"x"}', 404),
    ],
)
async def test_bodies(make_engine: MakeEngine, make_gateway: MakeGateway, body: bytes, status: int) -> None:
    """Of a name that comes twice the last counts, for the gateway as for engines (msgspec and Python's json alike)."""
    engine = await make_engine()
    gateway = await make_gateway(engine)
    answer: Answer = await ask(gateway, make_request(body, extra=CLOSE))
    assert answer.status == status
    assert answer.find("x-evil") == []
    assert len(answer.body) < 2000
    assert [seen.body for seen in engine.seen] == [body] * (status == 200)


@pytest.mark.parametrize("name", ["modèle/ü", "a b", "50%25", "a%2Fb", "模型", "x?y#z"])
async def test_model_names_of_any_characters_are_served_and_found(
    make_engine: MakeEngine, make_gateway: MakeGateway, name: str
) -> None:
    gateway = await make_gateway(engine := await make_engine())
    pool = gateway.process.world.snapshot.pools["tiny"]
    gateway.process.world.put_pool(msgspec.structs.replace(pool, model=name))
    body = json.dumps({"model": name, "prompt": "x"}).encode()
    assert (await ask(gateway, make_request(body, extra=CLOSE))).status == 200
    assert json.loads(engine.seen[0].body)["model"] == name
    path = f"/v1/models/{quote(name, safe='')}"
    found = await ask(gateway, make_request(b"", method="GET", path=path, extra=CLOSE))
    assert json.loads(found.body)["id"] == name
