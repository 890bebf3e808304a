"""Streams run while the fleet changes under them: none may be lost, doubled or falsely completed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from tests.e2e.conftest import Fleet

from demo.load import Tally, Verdict, run_load

pytestmark = [pytest.mark.node, pytest.mark.timeout(600)]
TOKENS = 40
CONCURRENCY = 12
PROMPTS = [f"Say something about the number {number}." for number in range(16)]


async def stream_during(url: str, model: str, change: Callable[[], object], *, at_least: int) -> Tally:
    """Keep streams open while `change` runs, and after it until `at_least` of them have ended."""
    stop = asyncio.Event()
    tally = Tally()
    load = asyncio.create_task(
        run_load(
            url, model=model, prompts=PROMPTS, tokens=TOKENS, concurrency=CONCURRENCY, stop=stop, tally=tally
        )
    )
    try:
        await asyncio.to_thread(change)
        while tally.total < at_least and not load.done():
            await asyncio.sleep(0.2)
    finally:
        stop.set()
        await load
    return tally


def assert_whole(tally: Tally) -> None:
    assert tally.counts[Verdict.COMPLETE] == tally.total, (str(tally), tally.details)


@pytest.mark.parametrize("streams", [150, pytest.param(500, marks=pytest.mark.slow)])
def test_op_036_rollout_and_scale_down_lose_no_stream(
    fleet: Fleet, gateway_url: Callable[[], str], streams: int
) -> None:
    site = fleet.site
    site.apply(fleet.make_fake_pool("rolling", replicas=2))
    before = site.wait_ready("rolling")["status"]["revision"]
    url = gateway_url()

    def roll() -> None:
        site.apply(fleet.make_fake_pool("rolling", replicas=2, revision="2"))
        after = site.wait_ready("rolling")
        assert after["status"]["revision"] != before
        assert after["status"]["updatedReplicas"] == 2

    tally = asyncio.run(stream_during(url, "rolling", roll, at_least=streams))
    assert tally.total >= streams
    assert_whole(tally)

    def shrink() -> None:
        site.apply(fleet.make_fake_pool("rolling", replicas=1, revision="2"))
        site.wait_ready("rolling")

    tally = asyncio.run(stream_during(url, "rolling", shrink, at_least=streams))
    assert tally.total >= streams
    assert_whole(tally)


@pytest.mark.parametrize("streams", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_killed_pod_fails_only_what_it_was_streaming(
    fleet: Fleet, gateway_url: Callable[[], str], streams: int
) -> None:
    site = fleet.site
    site.apply(fleet.make_fake_pool("killed", replicas=2))
    site.wait_ready("killed")
    url = gateway_url()

    def kill() -> None:
        names = site.run_kubectl(
            "get", "pods", "-l", "millpond.dev/pool=killed", "-o", "name", what="listing pods"
        ).split()
        site.run_kubectl("delete", names[0], "--grace-period=0", "--force", what="killing a pod")
        site.wait_ready("killed")

    tally = asyncio.run(stream_during(url, "killed", kill, at_least=streams))
    assert (
        tally.counts[Verdict.LOST] == tally.counts[Verdict.DUPLICATED] == tally.counts[Verdict.FALSE] == 0
    ), tally.details
    assert tally.counts[Verdict.FAILED] <= CONCURRENCY, (str(tally), tally.details)
