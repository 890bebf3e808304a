"""The admin port under clients that mean harm or do not care: probes of the kubelet are answered all the same."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import msgspec
import pytest
from tests.fixtures.gateway import MODEL, MakeEngine, MakeGateway, RunningGateway, Script

from millpond_common.contract.gateway_report import ProbeRequest, ProbeResult
from millpond_gateway.app import admin

Link = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def occupy(gateway: RunningGateway, count: int, sent: bytes = b"") -> AsyncIterator[list[Link]]:
    """Hold connections open that have sent `sent` and read nothing."""
    port = gateway.process.admin_port
    links = [await asyncio.open_connection("127.0.0.1", port, limit=1) for _ in range(count)]
    for _, writer in links:
        writer.write(sent)
    try:
        yield links
    finally:
        for _, writer in links:
            writer.transport.abort()
        await asyncio.sleep(0)


async def look(gateway: RunningGateway, times: int = 20) -> None:
    """Probe as the kubelet does, each time over a connection of its own."""
    for _ in range(times):
        async with httpx.AsyncClient(base_url=gateway.admin_url, timeout=5) as client:
            assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("sent", [b"", b"GET /health HT", b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n"])
async def test_idle_and_deaf_connections_never_keep_the_kubelet_out(
    make_engine: MakeEngine, make_gateway: MakeGateway, sent: bytes
) -> None:
    gateway = await make_gateway(await make_engine())
    async with occupy(gateway, 400, sent):
        await look(gateway)


async def test_who_waits_longest_makes_room(make_engine: MakeEngine, make_gateway: MakeGateway) -> None:
    gateway = await make_gateway(await make_engine())
    async with occupy(gateway, 1) as ((first, _),), httpx.AsyncClient(base_url=gateway.admin_url) as client:
        assert (await client.get("/health")).status_code == 200
        async with occupy(gateway, 255):
            async with asyncio.timeout(10):
                with contextlib.suppress(ConnectionError):
                    assert await first.read() == b""
            assert (await client.get("/health")).status_code == 200


async def test_half_a_request_is_waited_for_only_so_long(
    make_engine: MakeEngine, make_gateway: MakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "_REQUEST_SECONDS", 0.3)
    gateway = await make_gateway(await make_engine())
    async with occupy(gateway, 1, b"POST /v1/probe HTTP/1.1\r\ncontent-length: 50\r\n") as (
        (reader, writer),
    ):
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionError):
                for _ in range(50):  # a byte now and then buys no time
                    writer.write(b"x")
                    await asyncio.sleep(0.05)
                    if reader.at_eof():
                        break
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""


async def test_what_follows_a_request_disturbs_no_answer(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine(script=Script(gate=asyncio.Event()))
    gateway = await make_gateway(engine)
    body = msgspec.json.encode(ProbeRequest(MODEL, engine.address, 5.0))
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.process.admin_port)
    async with asyncio.timeout(20):
        async with httpx.AsyncClient(base_url=gateway.admin_url) as client:
            while (await client.get("/ready")).status_code != 200:
                await asyncio.sleep(0.02)
        writer.write(b"POST /v1/probe HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        while not engine.seen:
            await asyncio.sleep(0.01)
        writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        await asyncio.sleep(0.2)
        assert engine.script.gate is not None
        engine.script.gate.set()
        answer = await reader.read()
    writer.close()
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.startswith(b"HTTP/1.1 200")
    assert msgspec.json.decode(answer.partition(b"\r\n\r\n")[2], type=ProbeResult).ok
