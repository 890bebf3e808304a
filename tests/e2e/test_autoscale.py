"""The autoscaler with real gateways and engines: a request wakes a pool, load grows it, and it shrinks without losing a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest
from tests.e2e.conftest import Fleet
from tests.e2e.test_under_load import assert_whole
from tests.support.kube import wait_for

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


def knows(url: str, model: str) -> bool:
    listed = httpx.get(f"{url}/v1/models", timeout=30).json()["data"]
    return model in {card["id"] for card in listed}


@pytest.mark.slow  # tests/cluster/operator/test_scaling.py and tests/gateway/test_holding.py show its halves
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

    def wait_for_count(what: str, wanted: Callable[[int], bool]) -> None:
        wait_for(
            f"{what} replicas",
            lambda: wanted(count()),
            seconds=240,
            seen=lambda: site.fetch_pool("elastic").get("status"),
        )

    assert count() == 0
    wait_for("the gateway to know the pool", lambda: knows(url, "elastic"))
    body = {"model": "elastic", "prompt": "wake up", "max_tokens": 3}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=180)
    assert answer.status_code == 200, answer.text
    assert wait_for("the status to count it", count) == 1

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
        load(NEW_PROMPTS, lambda: wait_for_count("more", lambda n: n >= 2), tokens=8, concurrency=12)
    )
    assert_whole(tally)
    site.wait_ready("elastic")
    tally = asyncio.run(
        load(OLD_PROMPTS, lambda: wait_for_count("fewer", lambda n: n == 1), tokens=100, concurrency=4)
    )
    assert tally.total > 50
    assert_whole(tally)
