"""The admin port: health, readiness, metrics, report, probe; never held up by the data path."""

from __future__ import annotations

import asyncio
import time

import httpx
import msgspec
import pytest
from tests.fixtures.gateway import MODEL, MakeEngine, MakeGateway, RunningGateway, Script
from tests.gateway.wire import STREAM_BODY, ask, make_request, talk

from millpond_common.contract.gateway_report import GatewayReport, ProbeResult, RevisionReport
from millpond_gateway.flow.outliers import Evidence
from millpond_gateway.routing.records import PromptKeys, RequestView


async def test_health_and_readiness(make_engine: MakeEngine, make_gateway: MakeGateway) -> None:
    gateway = await make_gateway(await make_engine())
    async with httpx.AsyncClient(base_url=gateway.admin_url) as client:
        assert (await client.get("/health")).status_code == 200
        async with asyncio.timeout(20):
            while (await client.get("/ready")).status_code != 200:
                await asyncio.sleep(0.02)
        gateway.process.world.expect("another source")
        async with asyncio.timeout(20):
            while (await client.get("/ready")).status_code != 503:
                await asyncio.sleep(0.02)
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/nothing")).status_code == 404
        assert (await client.post("/health")).status_code == 405


async def test_gw_042_health_answers_while_the_data_loop_is_busy(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    gateway = await make_gateway(await make_engine(script=Script(first_seconds=0.5)))
    running = [asyncio.create_task(talk(gateway, make_request(STREAM_BODY), seconds=30)) for _ in range(500)]
    await asyncio.sleep(0.1)

    def look() -> list[float]:
        times = []
        with httpx.Client(base_url=gateway.admin_url) as client:
            for _ in range(10):
                began = time.monotonic()
                assert client.get("/health", timeout=20).status_code == 200
                times.append(time.monotonic() - began)
        return times

    times = sorted(await asyncio.to_thread(look))
    assert times[-3] < 1.0, "but for a pause of the machine"
    answers = await asyncio.gather(*running)
    assert all(answer.endswith(b"0\r\n\r\n") for answer in answers)


async def test_the_report_has_the_contract_s_form(make_engine: MakeEngine, make_gateway: MakeGateway) -> None:
    engine = await make_engine(script=Script(gate=asyncio.Event()))
    gateway = await make_gateway(engine)
    task = asyncio.create_task(ask(gateway, make_request()))
    async with httpx.AsyncClient(base_url=gateway.admin_url) as client:
        async with asyncio.timeout(20):
            while True:
                report = msgspec.json.decode((await client.get("/v1/report")).content, type=GatewayReport)
                if report.pools and report.pools[0].queued_tokens:
                    break
                await asyncio.sleep(0.05)
    (pool,) = report.pools
    (endpoint,) = pool.endpoints
    assert (pool.pool, endpoint.pod_uid, endpoint.routable, endpoint.open_requests) == (
        MODEL,
        engine.address,
        True,
        1,
    )
    assert endpoint.epoch == engine.epoch
    assert pool.last_request_seconds_ago is not None
    assert report.synced
    assert engine.script.gate is not None
    engine.script.gate.set()
    assert (await task).status == 200


@pytest.mark.parametrize(
    ("script", "uid", "ok", "status"),
    [
        (Script(), None, True, 200),
        (Script(refuse=(500, "engine_error", "broken")), None, False, 500),
        (Script(num_chunks=0), None, False, 200),
        (Script(), "unknown", False, 503),
    ],
)
async def test_a_probe_is_a_real_request_to_one_replica(
    script: Script, uid: str | None, ok: bool, status: int, make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    probed, other = await make_engine(script=script), await make_engine()
    gateway = await make_gateway(probed, other)
    await gateway.until_told()
    asked = {"pool": MODEL, "podUid": uid or probed.address, "timeoutSeconds": 20}
    async with httpx.AsyncClient(base_url=gateway.admin_url) as client:
        answer = await client.post("/v1/probe", json=asked)
        assert (await client.post("/v1/probe", json={"pool": MODEL})).status_code == 400
    result = msgspec.json.decode(answer.content, type=ProbeResult)
    assert (result.ok, result.status) == (ok, status), result
    assert len(probed.seen) == (0 if uid else 1)
    assert other.seen == []


async def test_a_probe_of_a_replica_that_hangs_ends_in_time(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine(script=Script(hang=True))
    gateway = await make_gateway(engine)
    await gateway.until_told()
    async with httpx.AsyncClient(base_url=gateway.admin_url) as client:
        asked = {"pool": MODEL, "podUid": engine.address, "timeoutSeconds": 0.3}
        result = (await client.post("/v1/probe", json=asked)).json()
    assert result["ok"] is False
    assert "0.3 s" in result["message"]
    async with asyncio.timeout(20):
        while engine.num_open:
            await asyncio.sleep(0.01)


async def test_gw_036_suspects_are_probed_and_a_failing_probe_ejects(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    broken = await make_engine(script=Script(refuse=(500, "engine_error", "broken")))
    sound = [await make_engine() for _ in range(3)]
    gateway = await make_gateway(broken, *sound)
    await gateway.until_told()
    async with asyncio.timeout(20):
        while gateway.process.fleet.pools[MODEL].verdict.ejected != {broken.address}:
            await ask(gateway, make_request())
    seen = len(broken.seen)
    statuses = [(await ask(gateway, make_request())).status for _ in range(12)]
    assert statuses == [200] * 12
    assert len(broken.seen) == seen


async def fetch_revision(gateway: RunningGateway, least: int) -> RevisionReport:
    """What the report, which is renewed now and then, says of the only revision once it counted `least` requests."""
    async with httpx.AsyncClient(base_url=gateway.admin_url) as client, asyncio.timeout(20):
        while True:
            report = msgspec.json.decode((await client.get("/v1/report")).content, type=GatewayReport)
            found = report.pools[0].revisions
            if found and found[0].num_requests >= least:
                return found[0]
            await asyncio.sleep(0.05)


async def test_op_034_the_report_counts_each_revision_apart(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    """What a rollout's gate is judged from: answers, failures and times to first token of real requests."""
    counted = {}
    scripts = {"good": (Script(first_seconds=0.05), 10), "bad": (Script(die_before_head=True), 1)}
    for name, (script, least) in scripts.items():
        engine = await make_engine(script=script)
        gateway = await make_gateway(engine, options={"static": (f"{MODEL}={engine.url}?revision={name}",)})
        await asyncio.gather(*(talk(gateway, make_request(STREAM_BODY), seconds=30) for _ in range(10)))
        counted[name] = await fetch_revision(gateway, least)
        assert counted[name].revision == name
    assert (counted["good"].num_requests, counted["good"].num_failed) == (10, 0)
    assert sum(count for _, count in counted["good"].ttft_counts) == 10
    assert min(bound for bound, _ in counted["good"].ttft_counts) >= 50
    assert counted["bad"].num_failed == counted["bad"].num_requests >= 1
    assert counted["bad"].ttft_counts == ()


def make_view(number: int) -> RequestView:
    return RequestView(request_id=str(number), prompt=PromptKeys(num_tokens=10))


async def test_a_pool_with_more_failing_replicas_than_may_be_ejected_says_so_and_routes_on(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engines = [await make_engine() for _ in range(4)]
    gateway = await make_gateway(*engines)
    state = gateway.process.fleet.pools[MODEL]
    now = asyncio.get_running_loop().time()
    flag = f'millpond_gateway_ejection_capped{{pool="{MODEL}"}} '

    async def until(value: str) -> None:
        async with asyncio.timeout(20):
            while flag + value not in gateway.process.make_metrics_text():
                await asyncio.sleep(0.05)

    await until("0.0")
    for engine in engines[:2]:
        engine.script.die_before_head = True  # the gateway's own probes fail as well
        for client in "abcdef":
            state.outliers.note(engine.address, Evidence.FAULT, client=client, now=now)
    await until("1.0")
    assert len(state.verdict.ejected) == 1
    failing = {engine.address for engine in engines[:2]} - state.verdict.ejected
    choices = {state.router.choose(make_view(number), now).endpoint for number in range(200)}
    assert failing < {choice.uid for choice in choices if choice is not None}
