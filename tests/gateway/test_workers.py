"""A real gateway of several worker processes over small engines in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.fixtures.gateway import MODEL, FakeEngine, MakeEngine, Script
from tests.support.ports import find_port

NUM_WORKERS = 2


@dataclass
class Gateway:
    """The supervising process and where it serves."""

    process: asyncio.subprocess.Process
    port: int
    admin_port: int
    client: httpx.AsyncClient

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def find_workers(self) -> list[int]:
        pid = self.process.pid
        return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    async def admin(self, path: str) -> httpx.Response:
        return await self.client.get(f"http://127.0.0.1:{self.admin_port}{path}", timeout=20)

    async def read_metric(self, start: str) -> float:
        text = (await self.admin("/metrics")).text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(start))

    async def until_counted(self, num_requests: int) -> None:
        """Wait until just so many requests are counted: each is when its last byte is on the way."""
        async with asyncio.timeout(20):
            while (found := await self.read_metric("millpond_gateway_requests_total")) < num_requests:
                await asyncio.sleep(0.05)
        assert found == num_requests

    async def until_ready(self) -> None:
        async with asyncio.timeout(90):
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    report = (await self.admin("/v1/report")).json()
                    routable = [e["routable"] for pool in report["pools"] for e in pool["endpoints"]]
                    if (await self.admin("/ready")).status_code == 200 and routable and all(routable):
                        return
                await asyncio.sleep(0.1)


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


MakeWorkers = Callable[..., Awaitable[Gateway]]


@pytest.fixture
async def make_workers(tmp_path: Path) -> AsyncIterator[MakeWorkers]:
    running: list[Gateway] = []

    async def make(*engines: FakeEngine, flags: tuple[str, ...] = ()) -> Gateway:
        port, admin_port = find_port(), find_port()
        static = f"{MODEL}={','.join(engine.url for engine in engines)}"
        arguments = ["--host", "127.0.0.1", "--port", str(port), "--admin-port", str(admin_port)]
        arguments += ["--peer-port", "0", "--static", static, "--workers", str(NUM_WORKERS), *flags]
        arguments += ["--poll-seconds", "0.2", "--drain-delay-seconds", "0"]
        log = (tmp_path / f"log{len(running)}").open("wb")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "millpond_gateway", *arguments, stdout=log, stderr=log
        )
        gateway = Gateway(process, port, admin_port, httpx.AsyncClient(headers={"connection": "close"}))
        running.append(gateway)
        await gateway.until_ready()
        return gateway

    yield make
    for gateway in running:
        await gateway.client.aclose()
        if gateway.process.returncode is None:
            gateway.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(30):
                await gateway.process.wait()


async def ask(gateway: Gateway, **body: Any) -> httpx.Response:
    content = {"model": MODEL, "prompt": "hello", **body}
    return await gateway.client.post(f"{gateway.url}/v1/completions", json=content, timeout=60)


async def test_workers_serve_one_port_and_answer_as_one(
    make_engine: MakeEngine, make_workers: MakeWorkers, tmp_path: Path
) -> None:
    engines = [await make_engine(script=Script(num_chunks=2)) for _ in range(2)]
    gateway = await make_workers(*engines)
    assert len(gateway.find_workers()) == NUM_WORKERS
    answers = await asyncio.gather(*(ask(gateway) for _ in range(40)))
    assert {answer.status_code for answer in answers} == {200}
    await gateway.until_counted(40)
    assert await gateway.read_metric("millpond_gateway_request_seconds_count") == 40
    assert await gateway.read_metric("millpond_gateway_output_tokens_total") == 80
    assert await gateway.read_metric("millpond_gateway_workers") == NUM_WORKERS
    assert await gateway.read_metric("millpond_gateway_peers_missing") == 0
    makers = {answer.headers["x-request-id"].rsplit("-", 1)[0] for answer in answers}
    assert len(makers) == NUM_WORKERS  # the prefix of an id is its process's own
    async with asyncio.timeout(20):  # the report is renewed now and then
        while True:
            report = (await gateway.admin("/v1/report")).json()
            pool = report["pools"][0]
            if sum(endpoint["openRequests"] for endpoint in pool["endpoints"]) == 0:
                break
            await asyncio.sleep(0.05)
    assert (report["synced"], len(pool["endpoints"])) == (True, 2)
    probe = {"pool": MODEL, "podUid": engines[1].address}
    told = await gateway.client.post(f"http://127.0.0.1:{gateway.admin_port}/v1/probe", json=probe)
    assert told.json()["ok"] is True
    requests: list[Any] = []
    async with asyncio.timeout(10):  # a thread of each worker writes lines now and then
        while len(requests) < 40:
            lines = (tmp_path / "log0").read_text().splitlines()
            requests = [json.loads(line) for line in lines if '"event":"request"' in line]
            await asyncio.sleep(0.05)


async def test_every_worker_knows_at_once_what_the_others_decided(
    make_engine: MakeEngine, make_workers: MakeWorkers
) -> None:
    engines = [await make_engine(script=Script(first_seconds=2.0)) for _ in range(2)]
    gateway = await make_workers(*engines)
    long = asyncio.create_task(
        ask(gateway, prompt="x" * 400_000)
    )  # by the speed expected, longer than the engine takes
    async with asyncio.timeout(20):
        while not any(engine.seen for engine in engines):
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.5)
    busy = next(engine for engine in engines if engine.seen)
    shorts = await asyncio.gather(*(ask(gateway, prompt="y") for _ in range(30)))
    assert {answer.status_code for answer in shorts} == {200}
    assert len({answer.headers["x-request-id"].rsplit("-", 1)[0] for answer in shorts}) == NUM_WORKERS
    assert len(busy.seen) == 1
    assert (await long).status_code == 200


async def test_a_dead_worker_is_replaced_and_its_counts_stay(
    make_engine: MakeEngine, make_workers: MakeWorkers
) -> None:
    gateway = await make_workers(await make_engine())
    await asyncio.gather(*(ask(gateway) for _ in range(20)))
    await gateway.until_counted(20)
    killed = gateway.find_workers()[0]
    os.kill(killed, signal.SIGKILL)
    async with asyncio.timeout(60):
        while killed in gateway.find_workers():
            await asyncio.sleep(0.02)
        assert (await gateway.admin("/ready")).status_code == 200
        assert (await gateway.admin("/health")).status_code == 200
        assert (await ask(gateway)).status_code == 200  # the port is the others' meanwhile
        while await gateway.read_metric("millpond_gateway_workers") != NUM_WORKERS:
            await asyncio.sleep(0.1)
    await gateway.until_ready()
    assert len(gateway.find_workers()) == NUM_WORKERS
    await asyncio.gather(*(ask(gateway) for _ in range(20)))
    await gateway.until_counted(41)
    assert await gateway.read_metric('millpond_gateway_worker_endings_total{reason="SIGKILL"}') == 1


async def test_all_workers_drain_and_no_stream_is_cut(
    make_engine: MakeEngine, make_workers: MakeWorkers
) -> None:
    engine = await make_engine(script=Script(num_chunks=30, chunk_seconds=0.1))
    gateway = await make_workers(engine)
    streams = [asyncio.create_task(ask(gateway, stream=True)) for _ in range(8)]
    async with asyncio.timeout(20):
        while engine.num_open < 8:
            await asyncio.sleep(0.01)
    gateway.process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(20):
        while (await gateway.admin("/ready")).status_code != 503:
            await asyncio.sleep(0.02)
    for answer in await asyncio.gather(*streams):
        assert answer.text.endswith("data: [DONE]\n\n")
    async with asyncio.timeout(20):
        assert await gateway.process.wait() == 0


async def test_workers_that_keep_ending_end_the_gateway_with_the_reason(
    make_engine: MakeEngine, make_workers: MakeWorkers, tmp_path: Path
) -> None:
    gateway = await make_workers(await make_engine())
    async with asyncio.timeout(120):
        while gateway.process.returncode is None:
            for pid in gateway.find_workers():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.3)
    assert gateway.process.returncode == 1
    log = (tmp_path / "log0").read_text()
    assert "giving up" in log
    assert re.search(r"\d+ workers ended within 60 s", log)


async def test_without_their_supervisor_workers_leave(
    make_engine: MakeEngine, make_workers: MakeWorkers
) -> None:
    gateway = await make_workers(await make_engine())
    workers = gateway.find_workers()
    gateway.process.kill()
    await gateway.process.wait()
    async with asyncio.timeout(20):
        while any(is_running(pid) for pid in workers):
            await asyncio.sleep(0.05)


async def test_no_request_meets_a_worker_that_knows_nothing_yet(
    make_engine: MakeEngine, make_workers: MakeWorkers
) -> None:
    gateway = await make_workers(await make_engine())
    killed = gateway.find_workers()[0]
    os.kill(killed, signal.SIGKILL)
    statuses: list[int] = []
    num_reset = num_after = 0
    async with asyncio.timeout(90):
        while num_after < 20:
            try:
                statuses.append((await ask(gateway)).status_code)
            except httpx.TransportError:
                num_reset += 1  # it was in the dead worker's hands
            back = await gateway.read_metric("millpond_gateway_workers") == NUM_WORKERS
            num_after += back and killed not in gateway.find_workers()
    assert set(statuses) == {200}
    assert num_reset <= 1
