"""Aborts and leaks: cases ENG-031 to ENG-036, ENG-064 to ENG-067 and the counters ENG-081 to ENG-085."""

from __future__ import annotations

import random

import pytest
from tests.unit.millpond_engine.core.harness import Loop, expect, make_request

from millpond_engine.records.capacity import Capacity
from millpond_engine.records.request import BeamParams, FinishReason
from millpond_engine.records.settings import ClassRule, SchedulerSettings, TenantRule
from millpond_engine.records.step import StepResult

OVERLAP = pytest.mark.parametrize("overlap", [False, True])


def make_loop(
    num_blocks: int = 64, *, overlap: bool = False, budget: int = 2048, size: int = 4, slots: int = 256
) -> Loop:
    capacity = Capacity(num_blocks=num_blocks, block_tokens=size, max_model_tokens=256, num_host_blocks=32)
    settings = SchedulerSettings(policy="Fifo", max_batch_tokens=budget, max_sequences=slots)
    return Loop(settings, capacity, overlap=overlap)


def test_eng_031_completion_after_an_abort_frees_nothing_twice():
    loop = make_loop()
    loop.add(make_request("r", 20, 8))
    plan = loop.scheduler.plan(0.0)
    result = loop.runner.run(plan)
    assert loop.abort("r")
    assert loop.scheduler.counts().used_blocks > 0, "the step in flight still reads them"
    loop.take(loop.scheduler.update(plan, result, 0.0))
    loop.assert_idle()
    loop.take(loop.scheduler.update(plan, result, 0.0))
    loop.take(loop.scheduler.update(plan, StepResult(999, (), 0.0), 0.0))
    assert not loop.abort("r")
    assert not loop.abort("unknown")
    assert loop.outcomes == {}
    loop.assert_idle()


def test_eng_032_an_abort_in_the_queue_releases_the_lookup():
    loop = make_loop(20, slots=1)
    loop.add(make_request("first", list(range(16)), 20))
    loop.run_steps(3)
    loop.add(make_request("waiting", list(range(16)), 20))
    loop.run_steps(3)
    counts = list(loop.state.cache.pool.counts)
    assert loop.abort("waiting")
    assert loop.state.cache.pool.counts == counts
    loop.scheduler.check_integrity()
    loop.run()
    loop.assert_idle()


def test_eng_033_an_abort_before_the_first_plan():
    loop = make_loop()
    loop.add(make_request("r", 20, 8))
    assert loop.abort("r")
    assert not loop.scheduler.has_work()
    assert loop.scheduler.plan(0.0).rows == ()
    loop.assert_idle()


@OVERLAP
def test_eng_034_an_abort_in_the_step_in_which_the_request_finishes(overlap):
    loop = make_loop(overlap=overlap)
    loop.add(make_request("r", 20, 3))
    while not loop.finished:
        loop.step()
    assert not loop.abort("r")
    loop.run()
    loop.assert_idle()


def test_eng_034_a_result_that_ends_the_request_after_its_abort():
    loop = make_loop()
    loop.add(make_request("r", 20, 1))
    plan = loop.scheduler.plan(0.0)
    result = loop.runner.run(plan)
    assert loop.abort("r")
    loop.take(loop.scheduler.update(plan, result, 0.0))
    assert loop.finished == []
    loop.assert_idle()


@OVERLAP
def test_eng_035_shared_blocks_are_counted_once(overlap):
    loop = make_loop(overlap=overlap)
    loop.add(make_request("before", list(range(20)), 1))
    loop.run()
    for i in range(2):
        loop.add(make_request(f"r{i}", [*range(20), 500 + i], 6))
    loop.run_steps(2)
    counts = loop.scheduler.counts()
    assert counts.used_blocks == 5 + 2
    assert counts.free_blocks + counts.cached_blocks + counts.used_blocks == 64
    loop.run()
    loop.assert_idle()


def test_eng_036_overlap_with_blocks_of_one_token():
    loop = make_loop(256, overlap=True, size=1)
    request = make_request("r", 5, 200)
    loop.add(request)
    loop.run()
    assert loop.output("r") == expect(request)
    loop.assert_idle()


@OVERLAP
@pytest.mark.parametrize("case", ["eng_064_queued", "eng_065_prefill", "eng_066_decode"])
def test_eng_064_065_066_a_close_at_any_point_frees_within_a_step(case, overlap):
    loop = make_loop(overlap=overlap, budget=16, slots=2)
    loop.add(make_request("other", 8, 40))
    if case == "eng_064_queued":
        loop.add(make_request("other2", 8, 40))
    loop.run_steps(2)
    loop.add(make_request(case, 60, 40))
    loop.run_steps({"eng_064_queued": 2, "eng_065_prefill": 2, "eng_066_decode": 9}[case])
    if case == "eng_066_decode":
        assert loop.output(case)
    assert loop.abort(case)
    assert case not in loop.state.groups
    plan = loop.step()
    loop.step()
    rows = {sequence.row for group in loop.state.groups.values() for sequence in group.running}
    assert {row.row for row in plan.rows} <= rows
    others = sum(len(sequence.table) for sequence in loop.state.running)
    assert loop.scheduler.counts().used_blocks == others
    loop.run()
    loop.assert_idle()


@OVERLAP
@pytest.mark.parametrize("rest", [{}, {"n": 4}, {"best_of": 3}, {"beam": BeamParams(3)}])
@pytest.mark.parametrize("steps", range(6))
def test_invariant_9_after_an_abort_the_pool_is_that_of_a_run_without_the_request(steps, rest, overlap):
    loop = make_loop(overlap=overlap, budget=8)
    loop.add(make_request("r", 13, 9, **rest))
    for _ in range(steps):
        loop.step()
    loop.abort("r")
    loop.run() if loop.flight else None
    loop.assert_idle()


def test_a_swapped_request_gives_its_host_blocks_back_when_aborted():
    classes = (ClassRule("high", priority=1), ClassRule("low", priority=0))
    capacity = Capacity(num_blocks=20, block_tokens=4, max_model_tokens=128, num_host_blocks=20)
    loop = Loop(SchedulerSettings(policy="Priority", preemption="Swap", classes=classes), capacity)
    loop.add(make_request("low", 40, 9, class_name="low"))
    loop.run_steps(2)
    loop.add(make_request("high", 60, 9, class_name="high"))
    loop.step()
    assert loop.scheduler.counts().used_host_blocks == 11
    assert loop.abort("low")
    loop.run()
    loop.assert_idle()


def test_one_choice_ends_early_and_the_others_go_on():
    loop = make_loop()
    loop.add(make_request("r", 6, 10, n=3))
    loop.run_steps(4)
    assert loop.scheduler.stop_sequence("r", 1, 0.0)
    assert not loop.scheduler.stop_sequence("r", 1, 0.0)
    loop.run()
    assert loop.finished == ["r"]
    assert len(loop.output("r", 0)) == len(loop.output("r", 2)) == 10
    assert len(loop.output("r", 1)) < 10
    assert loop.outcomes["r", 1].finish is None, "who stops a choice tells its end"
    loop.assert_idle()


def test_the_first_choice_may_end_before_the_prompt_is_computed():
    loop = make_loop(budget=4)
    request = make_request("r", 12, 5, n=3)
    loop.add(request)
    loop.step()
    assert loop.scheduler.stop_sequence("r", 0, 0.0)
    loop.run()
    assert loop.finished == ["r"]
    assert len(loop.output("r", 1)) == len(loop.output("r", 2)) == 5


def test_eng_081_one_prompt_report_per_request_however_it_is_chunked():
    loop = make_loop(budget=5)
    for i in range(6):
        loop.add(make_request(f"r{i}", 11 + i, 4, n=1 + i % 2))
    loop.run()
    assert sorted(loop.cached) == [f"r{i}" for i in range(6)]  # the harness refuses a second report


def test_eng_082_a_prefix_is_counted_once_however_often_admission_fails():
    loop = make_loop(20)
    loop.add(make_request("holder", list(range(60)), 16))
    loop.run_steps(2)
    loop.add(make_request("waiting", [*range(16), *range(500, 524)], 4))
    loop.run_steps(10)
    assert loop.scheduler.counts().num_waiting == 1
    assert loop.scheduler.counts().prefix_query_tokens == 60
    loop.run()
    counts = loop.scheduler.counts()
    assert counts.prefix_query_tokens == 100
    assert counts.prefix_hit_tokens == loop.cached["waiting"] == 16


def test_eng_082_resumption_after_preemption_is_no_second_query():
    capacity = Capacity(num_blocks=24, block_tokens=4, max_model_tokens=64)
    loop = Loop(SchedulerSettings(policy="Fifo"), capacity, optimistic=True)
    for i in range(8):
        loop.add(make_request(f"r{i}", 10, 20))
    loop.run()
    assert loop.preemptions
    counts = loop.scheduler.counts()
    assert (counts.prefix_query_tokens, counts.prefix_hit_tokens) == (80, 0)


def test_eng_083_arrivals_are_outcomes_plus_live_ones():
    loop = make_loop(20, slots=3)
    for i in range(8):
        loop.add(make_request(f"r{i}", 9, 6))
    aborted = 0
    for step in range(20):
        loop.step() if loop.scheduler.has_work() else None
        aborted += loop.abort(f"r{step}") if step in {1, 3, 5} else 0
        counts = loop.scheduler.counts()
        assert len(loop.finished) + aborted + counts.num_running + counts.num_waiting == 8
    assert aborted == 3


def test_eng_085_an_idle_engine_with_a_warm_cache_uses_nothing():
    loop = make_loop()
    for i in range(4):
        loop.add(make_request(f"r{i}", 20, 5))
    loop.run()
    counts = loop.scheduler.counts()
    assert counts.used_blocks == 0
    assert counts.cached_blocks >= 20
    assert counts.cached_value_tokens >= counts.cached_blocks * 4


@OVERLAP
def test_a_lost_step_ends_its_requests_and_leaves_the_pool_whole(overlap):
    loop = make_loop(overlap=overlap, slots=4, budget=16)
    for i in range(6):
        loop.add(make_request(f"r{i}", 9, 12, n=1 + i % 2))
    loop.run_steps(3)
    if loop.flight:
        loop.read(*loop.flight)
        loop.flight = None
    plan = loop.scheduler.plan(loop.now)
    lost = {sequence.group.request.request_id for sequence in loop.state.flights[plan.step]}
    loop.runner.rows.clear()
    loop.take(loop.scheduler.fail(plan, "the device is gone", loop.now))
    assert set(loop.finished) == lost
    for (request_id, _), outcome in loop.outcomes.items():
        assert request_id not in lost or outcome.finish is FinishReason.ERROR
    loop.state.dropped_rows.clear()  # the runner has lost every row
    loop.run()
    assert sorted(loop.finished) == [f"r{i}" for i in range(6)]
    loop.assert_idle()


def test_a_failed_row_ends_its_sequence_alone():
    loop = make_loop()
    for name in ("good", "bad"):
        loop.add(make_request(name, 9, 6))
    loop.run_steps(2)
    bad = loop.state.groups["bad"].running[0].row
    plan = loop.scheduler.plan(0.0)
    result = loop.runner.run(plan)
    rows = tuple(row for row in result.rows if row.row != bad)
    loop.take(loop.scheduler.update(plan, StepResult(plan.step, rows, 0.01, {bad: "nan"}), 0.0))
    loop.run()
    assert loop.outcomes["bad", 0].finish is FinishReason.ERROR
    assert loop.output("good") == expect(make_request("good", 9, 6))
    loop.assert_idle()


@OVERLAP
def test_blocks_are_counted_by_who_computed_them(overlap):
    settings = SchedulerSettings(
        policy="Fifo",
        preemption="Swap",
        classes=(ClassRule("chat", priority=1), ClassRule("batch")),
        default_class="chat",
        tenants=(TenantRule("acme", max_cache_percent=20), TenantRule("beta")),
    )
    capacity = Capacity(num_blocks=30, block_tokens=4, max_model_tokens=256, num_host_blocks=40)
    loop = Loop(settings, capacity, overlap=overlap, optimistic=True)
    rng = random.Random(11)
    seen = set()
    for number in range(60):
        tenant, name = rng.choice(["acme", "beta", "stranger", ""]), rng.choice(["chat", "batch", "odd"])
        prompt = [rng.randrange(3) for _ in range(rng.randint(4, 40))]
        request = make_request(f"r{number}", prompt, 20, tenant=tenant, class_name=name, namespace=(tenant,))
        loop.add(request)
        loop.run_steps(3)
        counts = loop.scheduler.counts()
        owners = {(owner.class_name, owner.tenant): owner for owner in counts.owners}
        assert set(owners) <= {(c, t) for c in ("chat", "batch") for t in ("acme", "beta", "")}
        assert sum(owner.used_blocks for owner in counts.owners) == counts.used_blocks
        assert sum(owner.cached_blocks for owner in counts.owners) == counts.cached_blocks
        assert sum(owner.host_blocks for owner in counts.owners) == counts.used_host_blocks
        for sequence in loop.state.running:
            if not sequence.shared and sequence.table:
                rule, owned = sequence.group.rule.name, sequence.group.request.tenant
                key = (rule, owned if owned in {"acme", "beta"} else "")
                assert owners[key].used_blocks >= len(sequence.table)
        seen |= {key for key, owner in owners.items() if owner.host_blocks}
    assert seen, "nothing was swapped: the test shows nothing about the host tier"
    loop.run()
    loop.assert_idle()
