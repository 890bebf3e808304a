"""A gateway that is told to leave while it holds requests for a pool at zero."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.fixtures.gateway import MODEL, MakeEngine
from tests.gateway.wire import BODY, STREAM_BODY, make_request
from tests.support.ports import find_port
from tests.support.small_api import NAMESPACE, SmallApi, make_pod, make_pool

NUM_HELD = 100


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SmallApi]:
    small = SmallApi()
    monkeypatch.setenv("KUBECONFIG", str(await small.start(tmp_path)))
    scaling = {"minReplicas": 0, "maxReplicas": 1, "coldStartHoldSeconds": 120}
    small.put("inferencepools", make_pool(MODEL, scaling=scaling))
    yield small
    await small.stop()


async def start_process(*flags: str) -> tuple[Process, int, int]:
    port, admin_port, peer_port = find_port(), find_port(), find_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "millpond_gateway", "--host", "127.0.0.1", "--port", str(port),
        "--admin-port", str(admin_port), "--peer-port", str(peer_port), "--namespace", NAMESPACE,
        "--no-kv-events", "--poll-seconds", "0.2", "--drain-delay-seconds", "0", *flags,
        stdout=PIPE, stderr=PIPE,
    )  # fmt: skip
    async with asyncio.timeout(60):
        while not (await fetch_report(admin_port)).get("pools"):
            await asyncio.sleep(0.05)
    return process, port, admin_port


async def fetch_report(admin_port: int) -> dict[str, object]:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", admin_port)
        writer.write(b"GET /v1/report HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        body = (await reader.read()).partition(b"\r\n\r\n")[2]
        writer.close()
        return dict(json.loads(body))
    except (OSError, ValueError):
        return {}


async def ask(port: int, body: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(make_request(body))
    received = await reader.read(-1)
    writer.close()
    return received


async def hold(port: int, admin_port: int) -> list[asyncio.Task[bytes]]:
    tasks = [
        asyncio.create_task(ask(port, STREAM_BODY if number % 2 else BODY)) for number in range(NUM_HELD)
    ]
    async with asyncio.timeout(60):
        while True:
            pools = (await fetch_report(admin_port)).get("pools")
            assert isinstance(pools, list)
            if pools and f'"heldRequests": {NUM_HELD}' in json.dumps(pools):
                return tasks
            await asyncio.sleep(0.1)


async def test_what_is_held_at_sigterm_is_served_when_a_replica_comes_within_the_grace(
    make_engine: MakeEngine, api: SmallApi
) -> None:
    engine = await make_engine()
    process, port, admin_port = await start_process("--grace-seconds", "90")
    tasks = await hold(port, admin_port)
    process.send_signal(signal.SIGTERM)
    await asyncio.sleep(0)
    api.put("pods", make_pod("late", MODEL, engine.port))
    answers = await asyncio.wait_for(asyncio.gather(*tasks), 90)
    assert {answer.partition(b"\r\n")[0] for answer in answers} == {b"HTTP/1.1 200 OK"}
    assert sum(answer.count(b"[DONE]") for answer in answers) == NUM_HELD // 2
    assert len(engine.seen) == NUM_HELD
    assert await asyncio.wait_for(process.wait(), 30) == 0


async def test_what_is_held_past_the_grace_is_answered_and_not_cut(api: SmallApi) -> None:
    process, port, admin_port = await start_process("--grace-seconds", "1")
    tasks = await hold(port, admin_port)
    process.send_signal(signal.SIGTERM)
    answers = await asyncio.wait_for(asyncio.gather(*tasks), 60)
    for answer in answers:
        head = answer.partition(b"\r\n\r\n")[0].lower()
        assert head.startswith(b"http/1.1 503")
        assert b"retry-after: 1" in head
        assert b'"code":"draining"' in answer
    assert await asyncio.wait_for(process.wait(), 30) == 0
