"""Second attempts beside late ones: within the budget, on proof, one answer, nothing left behind."""

from __future__ import annotations

import asyncio

import pytest
from tests.fixtures.gateway import MODEL, FakeEngine, MakeEngine, MakeGateway, RunningGateway, Script
from tests.gateway.wire import BODY, STREAM_BODY, ask, make_request, parse, talk

from millpond_gateway.world.records import Replica

QUIET_SECONDS = 0.6
"""Many times what makes a request late here."""


async def prepare(gateway: RunningGateway, *, credit: int = 3) -> None:
    """A gateway that has measured enough to know what is late, and earned a budget."""
    state = gateway.process.fleet.pools[MODEL]
    for _ in range(100):
        state.hedges.lateness.note(predicted_seconds=0.05, seconds=0.05)
    for _ in range(50 * credit):
        state.hedges.budget.note_request()


async def start_late(
    make_engine: MakeEngine, make_gateway: MakeGateway, **script: object
) -> tuple[RunningGateway, FakeEngine, FakeEngine, asyncio.Task[bytes]]:
    """A streaming request whose engine keeps it waiting, and an idle second engine."""
    late = await make_engine(phase_told="Waiting", script=Script(first_seconds=30, **script))  # type: ignore[arg-type]
    gateway = await make_gateway(late)
    return await _late(gateway, late, await make_engine())


async def _late(
    gateway: RunningGateway, late: FakeEngine, other: FakeEngine, *, credit: int = 3
) -> tuple[RunningGateway, FakeEngine, FakeEngine, asyncio.Task[bytes]]:
    await prepare(gateway, credit=credit)
    task = asyncio.create_task(talk(gateway, make_request(STREAM_BODY)))
    await until_seen(late)
    add_engine(gateway, other)
    await gateway.until_routable(2)
    return gateway, late, other, task


async def until_seen(engine: FakeEngine) -> None:
    """Wait until a request has come."""
    async with asyncio.timeout(20):
        while not engine.seen:
            await asyncio.sleep(0.005)


def add_engine(gateway: RunningGateway, engine: FakeEngine) -> None:
    address = engine.address
    gateway.process.world.put_replica(
        Replica(uid=address, pod=address, pool=MODEL, address=address, static=True)
    )


async def test_a_late_request_that_has_not_begun_is_answered_by_the_second_engine(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    gateway, late, other, task = await start_late(make_engine, make_gateway)
    answer = parse(await task)
    assert answer.status == 200
    assert answer.body.count(b"[DONE]") == 1
    assert answer.body.count(b'"text"') == 3
    assert len(late.seen) == len(other.seen) == 1
    async with asyncio.timeout(20):
        while late.num_open:
            await asyncio.sleep(0.01)
    await gateway.until_idle()
    text = gateway.process.make_metrics_text()
    assert 'millpond_gateway_hedges_total{pool="tiny",result="Won"' in text
    assert (
        'millpond_gateway_output_tokens_total{pool="tiny",tenant="",traffic_class="interactive"} 3.0' in text
    )
    state = gateway.process.fleet.pools[MODEL]
    assert state.budgets.num_open("") == 0
    assert not state.verdict.suspects


@pytest.mark.parametrize("phase", ["Running", "Finished", None])
async def test_a_request_that_may_have_begun_is_never_sent_twice(
    phase: str | None, make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    gate = asyncio.Event()
    late = await make_engine(phase_told=phase or "Running", script=Script(gate=gate))
    late.knows_requests = phase is not None
    gateway = await make_gateway(late)
    _, _, other, task = await _late(gateway, late, await make_engine())
    await asyncio.sleep(QUIET_SECONDS)
    gate.set()
    assert parse(await task).status == 200
    assert other.seen == []
    assert late.seen[0].finished


async def test_without_budget_nothing_is_hedged(make_engine: MakeEngine, make_gateway: MakeGateway) -> None:
    gate = asyncio.Event()
    late = await make_engine(phase_told="Waiting", script=Script(gate=gate))
    gateway = await make_gateway(late)
    _, _, other, task = await _late(gateway, late, await make_engine(), credit=0)
    await asyncio.sleep(QUIET_SECONDS)
    gate.set()
    assert parse(await task).status == 200
    assert other.seen == []


async def test_the_first_engine_may_still_win_and_the_second_is_cancelled(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    gate = asyncio.Event()
    late = await make_engine(phase_told="Waiting", script=Script(gate=gate))
    gateway = await make_gateway(late)
    _, _, other, task = await _late(gateway, late, await make_engine(script=Script(first_seconds=30)))
    await until_seen(other)
    gate.set()
    answer = parse(await task)
    assert answer.body.count(b"[DONE]") == 1
    assert len(other.seen) == 1
    async with asyncio.timeout(20):
        while other.num_open:
            await asyncio.sleep(0.01)
    await gateway.until_idle()
    assert 'result="Lost"' in gateway.process.make_metrics_text()


@pytest.mark.parametrize(
    "script",
    [
        Script(die_before_head=True),
        Script(refuse=(503, "overloaded", "busy")),
        Script(refuse=(500, "engine_error", "broken")),
        Script(raw=b"nonsense\r\n\r\n"),
    ],
    ids=["dies", "overloaded", "fails", "nonsense"],
)
async def test_a_second_attempt_that_fails_changes_nothing(
    script: Script, make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    gate = asyncio.Event()
    late = await make_engine(phase_told="Waiting", script=Script(gate=gate))
    gateway = await make_gateway(late)
    _, _, other, task = await _late(gateway, late, await make_engine(script=script))
    await until_seen(other)
    await asyncio.sleep(QUIET_SECONDS)
    gate.set()
    answer = parse(await task)
    assert (answer.status, answer.body.count(b"[DONE]")) == (200, 1)
    assert len(other.seen) == 1
    await gateway.until_idle()


@pytest.mark.parametrize("refusal", [None, (503, "overloaded", "busy")])
async def test_when_the_first_engine_fails_meanwhile_the_second_one_stands_in(
    refusal: tuple[int, str, str] | None, make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    first, second = asyncio.Event(), asyncio.Event()
    script = Script(gate=first, die_before_head=refusal is None, refuse=refusal)
    late = await make_engine(phase_told="Waiting", script=script)
    gateway = await make_gateway(late)
    _, _, other, task = await _late(gateway, late, await make_engine(script=Script(gate=second)))
    await until_seen(other)
    first.set()
    async with asyncio.timeout(20):
        while late.num_open:
            await asyncio.sleep(0.01)
    second.set()
    answer = parse(await task)
    assert (answer.status, answer.body.count(b"[DONE]")) == (200, 1)
    assert len(other.seen) == 1
    await gateway.until_idle()


async def test_a_client_that_leaves_ends_both(make_engine: MakeEngine, make_gateway: MakeGateway) -> None:
    late = await make_engine(phase_told="Waiting", script=Script(first_seconds=30))
    gateway = await make_gateway(late)
    other = await make_engine(script=Script(first_seconds=30))
    _, _, _, task = await _late(gateway, late, other)
    await until_seen(other)
    task.cancel()
    async with asyncio.timeout(20):
        while late.num_open or other.num_open:
            await asyncio.sleep(0.01)
    await gateway.until_idle()


async def test_revisions_get_their_shares_and_a_session_stays_with_its_revision(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    blue, green = await make_engine(), await make_engine()
    options = {
        "static": (f"{MODEL}={blue.url}?revision=blue,{green.url}?revision=green",),
        "weights": (f"{MODEL}=blue=90,green=10",),
    }
    gateway = await make_gateway(blue, green, options=options)
    for _ in range(200):
        assert (await ask(gateway, make_request(BODY))).status == 200
    assert 5 <= len(green.seen) <= 40
    assert len(blue.seen) + len(green.seen) == 200
    for engine in (blue, green):
        engine.seen.clear()
    for _ in range(30):
        await ask(gateway, make_request(BODY, extra=("X-Session-Id: one",)))
    assert {len(blue.seen), len(green.seen)} == {0, 30}
    await green.stop() if not blue.seen else await blue.stop()
    assert (await ask(gateway, make_request(BODY, extra=("X-Session-Id: one",)))).status == 200
