"""One table of what passes in each direction."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest
from tests.fixtures.gateway import MODEL, MakeEngine, MakeGateway, Script
from tests.gateway.wire import BODY, Answer, ask, make_request

from millpond_gateway.world.records import PoolClass, PoolTenant

TO_ENGINE = [
    ("Connection: keep-alive, x-private", "connection", None),
    ("X-Private: a", "x-private", None),
    ("Keep-Alive: timeout=5", "keep-alive", None),
    ("Proxy-Authorization: Basic x", "proxy-authorization", None),
    ("Proxy-Connection: keep-alive", "proxy-connection", None),
    ("TE: trailers", "te", None),
    ("Accept-Encoding: gzip", "accept-encoding", None),
    ("X-Millpond-Class: batch", "x-millpond-class", "interactive"),
    ("X-Millpond-Tenant: other", "x-millpond-tenant", None),
    ("X-Millpond-Deadline-Ms: 1", "x-millpond-deadline-ms", None),
    ("X-Millpond-Epoch: 00", "x-millpond-epoch", None),
    ("X-Millpond-Pin: secret/uid", "x-millpond-pin", None),
    ("X-Millpond-Endpoint: other", "x-millpond-endpoint", None),
    ("X-Request-Id: mine-1", "x-request-id", "mine-1"),
    ("X-Session-Id: s1", "x-session-id", "s1"),
    ("Authorization: Bearer k", "authorization", "Bearer k"),
    ("Accept: text/event-stream", "accept", "text/event-stream"),
    ("Content-Type: application/json", "content-type", "application/json"),
    (
        "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "traceparent",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    ),
]


async def test_gw_108_gw_110_request_headers(make_engine: MakeEngine, make_gateway: MakeGateway) -> None:
    engine = await make_engine()
    gateway = await make_gateway(engine)
    extra = tuple(line for line, _, _ in TO_ENGINE if not line.startswith("Content-Type"))
    assert (await ask(gateway, make_request(extra=extra))).status == 200
    seen = engine.seen[0].headers
    for line, name, expected in TO_ENGINE:
        assert seen.get(name) == expected, line
    assert seen["host"] == engine.address
    assert seen["content-length"] == str(len(BODY))


@pytest.mark.parametrize(
    ("line", "name", "expected"),
    [
        ("Server: uvicorn", "server", ["millpond-gateway"]),
        ("Connection: keep-alive", "connection", []),
        ("Keep-Alive: timeout=5", "keep-alive", []),
        ("Content-Type: application/json", "content-type", ["application/json"]),
        ("X-Request-Id: engine-made", "x-request-id", ["mine"]),
        ("X-Millpond-Epoch: 0123456789abcdef", "x-millpond-epoch", []),
        ("X-Millpond-Decision: made-up", "x-millpond-decision", []),
        ("X-Custom: kept", "x-custom", ["kept"]),
        ("Set-Cookie: a=b", "set-cookie", ["a=b"]),
        ("Retry-After: 7", "retry-after", ["7"]),
    ],
)
async def test_gw_108_response_headers(
    line: str, name: str, expected: list[str], make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    raw = f"HTTP/1.1 200 OK\r\n{line}\r\nContent-Length: 2\r\n\r\n{{}}".encode()
    gateway = await make_gateway(await make_engine(script=Script(raw=raw)))
    answer = await ask(gateway, make_request(extra=("X-Request-Id: mine",)))
    assert answer.find(name) == expected
    assert answer.find("content-length") == ["2"]
    assert answer.body == b"{}"


async def test_gw_107_a_streamed_answer_has_no_length(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    raw = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    gateway = await make_gateway(await make_engine(script=Script(raw=raw)))
    answer = await ask(gateway, make_request())
    assert answer.find("content-length") == []
    assert answer.find("transfer-encoding") == ["chunked"]
    assert answer.body == b"2\r\n{}\r\n0\r\n\r\n"


async def test_gw_111_an_engine_error_passes_unchanged(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    for status, code in {
        400: "context_length_exceeded",
        429: "tenant_tokens",
        500: "engine_error",
        501: "x",
    }.items():
        engine = await make_engine(script=Script(refuse=(status, code, 'a "quoted" text')))
        gateway = await make_gateway(engine)
        answer = await ask(gateway, make_request())
        assert (answer.status, answer.code) == (status, code)
        assert answer.body.count(b'"error"') == 1
        assert len(engine.seen) == 1


async def test_a_bad_request_id_is_replaced(make_engine: MakeEngine, make_gateway: MakeGateway) -> None:
    engine = await make_engine()
    gateway = await make_gateway(engine)
    for offered in ("", "a" * 129, "with space", "caf\xe9"):
        answer = await ask(gateway, make_request(extra=(f"X-Request-Id: {offered}",)))
        assert answer.find("x-request-id") != [offered]
        assert engine.seen[-1].headers["x-request-id"] == answer.find("x-request-id")[0]


async def test_decisions_are_shown_only_when_asked_for(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine()
    plain = await ask(await make_gateway(engine), make_request())
    shown = await ask(await make_gateway(engine, expose_decisions=True), make_request())
    assert plain.find("x-millpond-decision") == []
    assert shown.find("x-millpond-endpoint") == [engine.address]
    assert "queue=" in shown.find("x-millpond-decision")[0]


async def test_class_and_deadline_are_told_to_the_engine_by_the_gateway_alone(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine()
    gateway = await make_gateway(engine)
    world = gateway.process.world
    classes = (PoolClass(name="interactive", ttft_seconds=0.7), PoolClass(name="batch"))
    world.put_pool(msgspec.structs.replace(world.snapshot.pools[MODEL], classes=classes))
    for tier, name in (("batch", "batch"), ("unknown", "interactive"), (None, "interactive")):
        body = json.dumps({"model": MODEL, "prompt": "x", "service_tier": tier}).encode()
        extra = ("X-Millpond-Class: forged", "X-Millpond-Deadline-Ms: 9")
        assert (await ask(gateway, make_request(body, extra=extra))).status == 200
        seen = engine.seen[-1].headers
        assert seen["x-millpond-class"] == name
        if name == "interactive":
            assert 1 <= int(seen["x-millpond-deadline-ms"]) <= 700
        else:
            assert "x-millpond-deadline-ms" not in seen


async def test_a_tenant_s_key_stays_in_the_gateway(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine()
    gateway = await make_gateway(engine)
    world = gateway.process.world
    tenants = (PoolTenant(name="acme", key_secret="acme-keys", max_concurrency=1),)
    world.put_pool(msgspec.structs.replace(world.snapshot.pools[MODEL], tenants=tenants))
    gateway.process.fleet.keys.replace({"acme-keys": [b"k1"], "other-keys": [b"k2"]})
    for key, status in {"k1": 200, "k2": 403, "k3": 401}.items():
        answer = await ask(gateway, make_request(extra=(f"Authorization: Bearer {key}",)))
        assert answer.status == status, key
    assert (await ask(gateway, make_request())).status == 401
    (seen,) = engine.seen
    assert seen.headers["x-millpond-tenant"] == "acme"
    assert "authorization" not in seen.headers
    engine.script.first_seconds = 0.3
    both = [
        asyncio.create_task(ask(gateway, make_request(extra=("Authorization: Bearer k1",)))) for _ in range(2)
    ]
    answers = sorted([await task for task in both], key=lambda answer: answer.status)
    assert [answer.status for answer in answers] == [200, 429]
    assert answers[1].code == "tenant_concurrency"
    await gateway.until_idle()
    assert (await ask(gateway, make_request(extra=("Authorization: Bearer k1",)))).status == 200


async def test_a_key_of_one_pool_neither_opens_another_nor_closes_an_open_one(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine()
    gateway = await make_gateway(engine)
    world = gateway.process.world
    open_pool = world.snapshot.pools[MODEL]
    closed = (PoolTenant(name="acme", key_secret="theirs"),)
    world.put_pool(msgspec.structs.replace(open_pool, name="closed", model="closed", tenants=closed))
    gateway.process.fleet.keys.replace({"theirs": [b"k1"]})

    async def say(model: str, key: str | None) -> Answer:
        body = json.dumps({"model": model, "prompt": "x"}).encode()
        return await ask(gateway, make_request(body, extra=(f"Authorization: Bearer {key}",) if key else ()))

    for key in (None, "none", "k1"):  # OpenAI's clients always send some key
        assert (await say(MODEL, key)).status == 200, key
        assert "authorization" not in engine.seen[-1].headers or key is None
    assert [(await say("closed", key)).status for key in (None, "none")] == [401, 401]
    assert (await say("closed", "k1")).status == 503, "admitted; the pool has no replica"
    unknown = await say("nothing", "none")
    assert unknown.status == 404
    assert b"closed" not in unknown.body, "whom a pool does not serve it is not shown to"
    assert b"closed" in (await say("nothing", "k1")).body


async def test_of_two_pools_with_one_model_name_the_older_serves(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    gateway = await make_gateway(await make_engine())
    world, fleet = gateway.process.world, gateway.process.fleet
    pool = msgspec.structs.replace(world.snapshot.pools[MODEL], created_at=1000)
    world.put_pool(pool)
    for name, created_at in (("later", 2000), ("earlier", 500)):
        world.put_pool(msgspec.structs.replace(pool, name=name, created_at=created_at))
    assert fleet.find_pool_name(MODEL) == "earlier"
    world.put_pool(msgspec.structs.replace(pool, name="earlier", created_at=500, deleting=True))
    assert fleet.find_pool_name(MODEL) == MODEL
