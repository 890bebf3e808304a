"""The autoscaler with real gateways and engines: a request wakes a pool, load grows it, and it shrinks without losing a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httpx
import pytest
from tests.e2e.conftest import Fleet
from tests.e2e.test_under_load import assert_whole

from demo.load import Tally, run_load

pytestmark = [pytest.mark.node, pytest.mark.timeout(600)]
SCALING = {
    "minReplicas": 0,
    "maxReplicas": 3,
    "idleSeconds": 600,
    "coldStartHoldSeconds": 120,
    "scaleDownStabilizationSeconds": 5,
}
SLOW = ["--runner", "fake", "--fake-prefill-tokens-per-second", "300", "--fake-decode-step-seconds", "0.02",
        "--fake-load-seconds", "1"]  # fmt: skip
NEW_PROMPTS = [f"{number}: " + "say something about it " * 12 for number in range(20_000)]
OLD_PROMPTS = NEW_PROMPTS[:4]


def test_as_019_load_wakes_grows_and_shrinks_a_pool_and_no_stream_is_lost(
    fleet: Fleet, gateway_url: Callable[[], str]
) -> None:
    site = fleet.site
    pool = fleet.make_fake_pool("elastic", replicas=1)
    del pool["spec"]["replicas"]
    pool["spec"]["scaling"] = SCALING
    pool["spec"]["engine"]["extraArgs"] = SLOW
    site.apply(fleet.make_fake_pool("neighbour", replicas=1))  # keeps a gateway up to be asked
    site.wait_ready("neighbour")
    site.apply(pool)
    url = gateway_url()

    def count() -> int:
        return int(site.fetch_pool("elastic").get("status", {}).get("desiredReplicas") or 0)

    def wait_for_count(wanted: Callable[[int], bool], *, seconds: float) -> int:
        deadline = time.monotonic() + seconds
        while not wanted(found := count()):
            assert time.monotonic() < deadline, (found, site.fetch_pool("elastic").get("status"))
            time.sleep(1)
        return found

    assert count() == 0
    body = {"model": "elastic", "prompt": "wake up", "max_tokens": 3}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    assert count() == 1

    async def load(
        prompts: list[str], change: Callable[[], object], *, tokens: int, concurrency: int
    ) -> Tally:
        stop, tally = asyncio.Event(), Tally()
        task = asyncio.create_task(
            run_load(
                url,
                model="elastic",
                prompts=prompts,
                tokens=tokens,
                concurrency=concurrency,
                stop=stop,
                tally=tally,
            )
        )
        try:
            await asyncio.to_thread(change)
            while (
                tally.total <= 50 and not task.done()
            ):  # how many fit into the change depends on the machine
                await asyncio.sleep(0.2)
        finally:
            stop.set()
            await task
        return tally

    tally = asyncio.run(
        load(NEW_PROMPTS, lambda: wait_for_count(lambda n: n >= 2, seconds=90), tokens=8, concurrency=12)
    )
    assert_whole(tally)
    site.wait_ready("elastic")
    tally = asyncio.run(
        load(OLD_PROMPTS, lambda: wait_for_count(lambda n: n == 1, seconds=180), tokens=100, concurrency=4)
    )
    assert tally.total > 50
    assert_whole(tally)
