"""A gateway that is told to leave: unready first, then no new connections, and every stream to its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process

import httpx
import pytest
from tests.fixtures.gateway import MODEL, FakeEngine, MakeEngine, MakeGateway, Script
from tests.gateway.wire import STREAM_BODY, ask, make_request


async def start_process(engine: FakeEngine, *flags: str) -> tuple[Process, int, int]:
    """`millpond-gateway` as a process of its own, and its two ports."""
    command = [
        sys.executable,
        "-m",
        "millpond_gateway",
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--admin-port",
        "0",
    ]
    process = await asyncio.create_subprocess_exec(
        *command, "--static", f"{MODEL}={engine.url}", *flags, stdout=PIPE, stderr=PIPE
    )
    port = admin_port = 0
    assert process.stderr is not None
    async with asyncio.timeout(20):
        while True:
            line = json.loads(await process.stderr.readline())
            if line["event"] == "engine":
                return process, port, admin_port
            if line["event"] == "serving":
                port, admin_port = line["port"], line["admin_port"]


async def read_stream(port: int) -> tuple[int, bytes]:
    async with httpx.AsyncClient(timeout=30) as client:
        answer = await client.post(
            f"http://127.0.0.1:{port}/v1/completions",
            content=STREAM_BODY,
            headers={"content-type": "application/json"},
        )
        return answer.status_code, answer.content


async def until_running(engine: FakeEngine, count: int) -> None:
    async with asyncio.timeout(20):
        while engine.num_open < count:
            await asyncio.sleep(0.01)


async def test_gw_044_gw_048_gw_050_sigterm_lets_streams_finish_and_exits_0(make_engine: MakeEngine) -> None:
    engine = await make_engine(script=Script(num_chunks=70, chunk_seconds=0.1))
    process, port, admin_port = await start_process(
        engine, "--drain-delay-seconds", "1.5", "--grace-seconds", "60"
    )
    streams = [asyncio.create_task(read_stream(port)) for _ in range(5)]
    await until_running(engine, 5)
    process.send_signal(signal.SIGTERM)
    async with httpx.AsyncClient() as client:
        async with asyncio.timeout(20):
            while (await client.get(f"http://127.0.0.1:{admin_port}/ready")).status_code != 503:
                await asyncio.sleep(0.02)
        late = await client.get(f"http://127.0.0.1:{port}/v1/models")  # no endpoint list has dropped us yet
    assert late.status_code == 200
    assert late.headers["connection"] == "close"
    await asyncio.sleep(2.5)  # a delay since the latest connection, and a second for the machine
    with pytest.raises(OSError, match="Connect"):
        await asyncio.open_connection("127.0.0.1", port)
    results = await asyncio.gather(*streams)
    assert all(status == 200 and body.endswith(b"data: [DONE]\n\n") for status, body in results)
    assert await asyncio.wait_for(process.wait(), 30) == 0
    assert process.stdout is not None
    lines = [json.loads(line) for line in (await process.stdout.read()).splitlines()]
    assert sum(line["path"] == "/v1/completions" and line["outcome"] == "Completed" for line in lines) == 5
    assert b"hello" not in json.dumps(lines).encode()  # no prompt in the log


async def test_a_stream_that_outlives_the_grace_ends_with_an_error_event(make_engine: MakeEngine) -> None:
    engine = await make_engine(script=Script(num_chunks=1000, chunk_seconds=0.05))
    process, port, _ = await start_process(engine, "--drain-delay-seconds", "0", "--grace-seconds", "0.3")

    async def read() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(make_request(STREAM_BODY))
        received = await reader.read(-1)
        writer.close()
        return received

    task = asyncio.create_task(read())
    await until_running(engine, 1)
    process.send_signal(signal.SIGTERM)
    received = await asyncio.wait_for(task, 30)
    assert received.rpartition(b"event: error")[2].count(b"draining") == 1
    assert not received.endswith(b"0\r\n\r\n")
    assert await asyncio.wait_for(process.wait(), 30) == 0
    async with asyncio.timeout(20):
        while engine.num_open:
            await asyncio.sleep(0.01)


async def test_gw_047_a_leaving_gateway_accepts_while_connections_still_come(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    """A node that learns late of the leaving keeps sending connections: each is still answered, up to a bound."""
    engine = await make_engine()
    gateway = await make_gateway(engine, options={"drain_delay_seconds": 1.0, "grace_seconds": 5.0})
    loop = asyncio.get_running_loop()
    drain = asyncio.create_task(gateway.process.drain())
    started = loop.time()
    async with httpx.AsyncClient() as client:
        for _ in range(9):  # well past one delay, each within a delay of the one before
            await asyncio.sleep(0.2)
            answer = await client.post(f"{gateway.url}/v1/completions", json={"model": MODEL, "prompt": "x"})
            assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        assert not drain.done()
        while not drain.done() and loop.time() < started + 20:
            with contextlib.suppress(httpx.ConnectError):
                await client.post(f"{gateway.url}/v1/completions", json={"model": MODEL, "prompt": "x"})
            await asyncio.sleep(0.2)
    assert drain.done(), "five delays are the most"
    assert 4.0 < loop.time() - started < 12


async def test_gw_047_gw_049_a_rolling_update_of_gateways_costs_no_request(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine(script=Script(first_seconds=0.02))
    gateways = [
        await make_gateway(engine, options={"drain_delay_seconds": 0.3, "grace_seconds": 5.0})
        for _ in range(2)
    ]
    failures: list[str] = []
    stop = asyncio.Event()

    async def load() -> None:
        async with httpx.AsyncClient() as client:
            while not stop.is_set():
                # An endpoint list that follows readiness within 0.2 s, as kube-proxy's does.
                target = gateways[-1]
                try:
                    answer = await client.post(
                        f"{target.url}/v1/completions", json={"model": MODEL, "prompt": "x"}
                    )
                    if answer.status_code != 200:
                        failures.append(str(answer.status_code))
                except httpx.HTTPError as error:
                    failures.append(repr(error))

    workers = [asyncio.create_task(load()) for _ in range(10)]
    await asyncio.sleep(0.3)
    leaving = gateways[-1]
    drain = asyncio.create_task(leaving.process.drain())
    await asyncio.sleep(0.2)
    gateways.pop()
    await drain
    await asyncio.sleep(0.2)
    stop.set()
    await asyncio.gather(*workers)
    assert failures == []
    assert leaving.process.relay.num_requests == 0


async def test_wrong_flags_say_what_is_allowed(make_engine: MakeEngine) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "millpond_gateway", "--static", "nonsense", stdout=PIPE, stderr=PIPE
    )
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert b"NAME=URL" in errors


async def test_an_idle_keep_alive_connection_is_closed_by_a_drain(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    gateway = await make_gateway(await make_engine())
    assert (await ask(gateway, make_request())).status == 200
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.process.port)
    async with asyncio.timeout(20):
        await asyncio.gather(gateway.process.drain(), reader.read())
    writer.close()
