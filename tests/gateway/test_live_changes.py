"""What changes in the cluster while clients are at work: keys, replicas of a session, revisions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from openai import APIStatusError, AsyncOpenAI
from tests.fixtures.gateway import MODEL, FakeEngine, MakeEngine, MakeGateway, RunningGateway, Script
from tests.gateway.wire import ask, make_request
from tests.support.ports import find_port
from tests.support.small_api import NAMESPACE, SmallApi, make_pod, make_pool

from millpond_common.contract import headers, labels
from millpond_gateway.world import secrets

KEYS = "acme-keys"
TENANT = {"name": "acme", "apiKeySecretRef": {"name": KEYS}}


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SmallApi]:
    """The keys of the tenant are read five times a second, not once a minute."""
    monkeypatch.setattr(secrets, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(secrets, "_READ_SECONDS", 0.2)
    monkeypatch.setattr(secrets, "_RETRY_SECONDS", 0.2)
    small = SmallApi()
    monkeypatch.setenv("KUBECONFIG", str(await small.start(tmp_path)))
    yield small
    await small.stop()


async def start(make_gateway: MakeGateway, num_routable: int) -> RunningGateway:
    options = {"namespace": NAMESPACE, "peer_port": find_port(), "kv_events": False}
    gateway = await make_gateway(options=options)
    await gateway.until_routable(num_routable)
    return gateway


def make_client(gateway: RunningGateway, key: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)


async def ask_status(client: AsyncOpenAI) -> int:
    try:
        await client.completions.create(model=MODEL, prompt="hello")
    except APIStatusError as error:
        return error.status_code
    return 200


async def until_status(client: AsyncOpenAI, status: int) -> None:
    async with asyncio.timeout(30):
        while await ask_status(client) != status:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("gone", [True, False])
async def test_a_withdrawn_key_ends_with_the_next_request_and_not_within_a_stream(
    make_engine: MakeEngine, make_gateway: MakeGateway, api: SmallApi, gone: bool
) -> None:
    engine = await make_engine(script=Script(num_chunks=40, chunk_seconds=0.05))
    api.secrets[KEYS] = ["old-key"]
    api.put("inferencepools", make_pool(MODEL, tenants=[TENANT]))
    api.put("pods", make_pod("a", MODEL, engine.port))
    gateway = await start(make_gateway, 1)
    client = make_client(gateway, "old-key")
    await until_status(client, 200)
    stream = await client.completions.create(model=MODEL, prompt="hello", stream=True)
    parts = 0
    async for _ in stream:
        parts += 1
        if parts == 2 and gone:
            del api.secrets[KEYS]
        elif parts == 2:
            api.secrets[KEYS] = ["other-key"]
    assert parts == 40, "what runs goes on to its end"
    await until_status(client, 401)  # over kept connections
    assert await ask_status(make_client(gateway, "other-key")) == (401 if gone else 200)


async def test_while_two_keys_count_a_change_costs_no_request(
    make_engine: MakeEngine, make_gateway: MakeGateway, api: SmallApi
) -> None:
    engine = await make_engine()
    api.secrets[KEYS] = ["old-key"]
    api.put("inferencepools", make_pool(MODEL, tenants=[TENANT]))
    api.put("pods", make_pod("a", MODEL, engine.port))
    gateway = await start(make_gateway, 1)
    old, new = make_client(gateway, "old-key"), make_client(gateway, "new-key")
    await until_status(old, 200)
    assert await ask_status(new) == 401
    api.secrets[KEYS] = ["old-key", "new-key"]
    await until_status(new, 200)
    statuses = set()
    for _ in range(20):
        statuses |= {await ask_status(old), await ask_status(new)}
    api.secret_status = 503  # the API server is ill: what was read stays good
    reads = api.num_secret_reads
    while api.num_secret_reads < reads + 3:
        statuses |= {await ask_status(old), await ask_status(new)}
    api.secret_status = None
    assert statuses == {200}
    api.secrets[KEYS] = ["new-key"]
    refused = asyncio.create_task(until_status(old, 401))
    while not refused.done():
        assert await ask_status(new) == 200
    await refused
    assert await ask_status(new) == 200


async def find_holder(gateway: RunningGateway, engines: list[FakeEngine], session: str) -> int:
    """The engine that got each of a few requests of a session."""
    before = [len(engine.seen) for engine in engines]
    request = make_request(extra=(f"{headers.SESSION}: {session}",))
    for _ in range(6):
        assert (await ask(gateway, request)).status == 200
    counts = [len(engine.seen) - was for engine, was in zip(engines, before, strict=True)]
    assert sorted(counts)[-1] == 6, counts
    return counts.index(6)


@pytest.mark.parametrize("change", ["cordoned", "deleted", "unready", "dead", "unweighted"])
async def test_a_session_moves_when_its_replica_may_not_be_chosen_any_more(
    make_engine: MakeEngine, make_gateway: MakeGateway, api: SmallApi, change: str
) -> None:
    engines = [await make_engine() for _ in range(3)]
    pool = make_pool(MODEL)
    api.put("inferencepools", pool)
    for number, engine in enumerate(engines):
        api.put("pods", make_pod(f"p{number}", MODEL, engine.port, revision=f"r{number}"))
    gateway = await start(make_gateway, 3)
    holder = await find_holder(gateway, engines, "s")
    pod = api.objects["pods"][f"p{holder}"]
    num_left = 2
    if change == "cordoned":
        pod["metadata"]["labels"][labels.CORDONED] = "true"
        api.put("pods", pod)
    elif change == "deleted":
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        api.put("pods", pod)
    elif change == "unready":
        pod["status"]["conditions"][0]["status"] = "False"
        api.put("pods", pod)
    elif change == "dead":
        await engines[holder].stop()
        num_left = 3
    else:
        weights = ",".join(f"r{number}={int(number != holder)}" for number in range(3))
        pool["metadata"]["annotations"][labels.REVISION_WEIGHTS] = weights
        api.put("inferencepools", pool)
        async with asyncio.timeout(20):
            while not gateway.process.world.snapshot.pools[MODEL].revision_weights:
                await asyncio.sleep(0.01)
        num_left = 3
    if num_left == 2:
        await gateway.until_routable(2)
    seen = len(engines[holder].seen)
    follower = await find_holder(gateway, engines, "s")
    assert follower != holder
    assert len(engines[holder].seen) == seen
    await gateway.until_idle()
