"""Priority and preemption: cases ENG-011 to ENG-019, ENG-073, ENG-075 and ENG-076."""

from __future__ import annotations

import random

import pytest
from tests.unit.millpond_engine.core.harness import VOCABULARY, Loop, TokenRunner, crc, expect, make_request

from millpond_engine.core.builder import PlanBuilder
from millpond_engine.records.capacity import Capacity
from millpond_engine.records.request import RefusalReason, SamplingParams
from millpond_engine.records.settings import ClassRule, SchedulerSettings

LADDER = (ClassRule("low", priority=0), ClassRule("middle", priority=1), ClassRule("high", priority=2))


def make_capacity(
    num_blocks: int, *, size: int = 4, host: int = 0, context: int = 256, speed: float = 0.0
) -> Capacity:
    return Capacity(
        num_blocks=num_blocks,
        block_tokens=size,
        max_model_tokens=context,
        num_host_blocks=host,
        bytes_per_block=1000,
        copy_bytes_per_second=speed,
    )


def test_eng_011_a_victim_that_was_planned_in_the_same_pass_leaves_the_plan():
    settings = SchedulerSettings(policy="Fifo", classes=LADDER, watermark_percent=0, max_batch_tokens=24)
    loop = Loop(settings, make_capacity(8), optimistic=True)
    requests = [make_request(name, 7, 10, class_name=name) for name in ("low", "middle", "high")]
    for request in requests:
        loop.add(request)
    rows: dict[str, int] = {}
    while not loop.preemptions:
        rows = {name: group.running[0].row for name, group in loop.state.groups.items() if group.running}
        plan = loop.step()
    assert loop.preemptions == {"low": 1}
    # all three wanted a third block, two were free: the first planned became the victim of the last
    assert [row.row for row in plan.rows] == [rows["middle"], rows["high"]]
    assert all(row.new_blocks for row in plan.rows)
    assert plan.num_tokens == 2
    assert plan.dropped_rows == (rows["low"],)
    loop.run()
    for request in requests:
        assert loop.output(request.request_id) == expect(request)


def test_eng_011_what_a_victim_got_in_the_same_plan_is_taken_back():
    loop = Loop()
    for name in ("decode", "prefill"):
        loop.add(make_request(name, 12, 4))
    loop.step()
    builder = PlanBuilder(loop.state.step + 1, 10)
    decode, other = (loop.state.groups[name].running[0] for name in ("decode", "prefill"))
    before = (decode.computed, decode.pending, decode.flights, decode.group.account.tokens)
    builder.schedule(decode, 1)
    builder.schedule(other, 1)
    builder.cancel(decode)
    builder.cancel(other)
    builder.cancel(other)
    assert builder.budget == 10
    assert builder.empty
    assert (decode.computed, decode.pending, decode.flights, decode.group.account.tokens) == before
    loop.run()


def test_eng_012_a_preempted_request_goes_before_one_that_never_ran_and_hits_its_blocks():
    settings = SchedulerSettings(policy="Fifo", watermark_percent=0)
    loop = Loop(settings, make_capacity(30), optimistic=True)
    loop.add(make_request("old", 40, 30, arrival_seconds=-1.0))
    loop.add(make_request("young", 40, 30, arrival_seconds=1.0))
    loop.step()
    loop.add(make_request("never", 80, 4, arrival_seconds=0.0))
    while "young" not in loop.preemptions:
        loop.step()
    queued = [group.request.request_id for group in loop.state.policy.order(loop.state.queue, loop.now)]
    assert queued == ["young", "never"]
    loop.run()
    assert loop.finished.index("young") < loop.finished.index("never")
    lost = sum(preempted.lost_tokens for output in loop.outputs for preempted in output.preemptions)
    assert loop.state.counters.recomputed_tokens < lost, "some of its blocks were still cached"


def test_eng_012_the_boost_is_bounded():
    loop = Loop(SchedulerSettings(policy="Fifo", max_boosts=2))
    for name, arrival in (("never", 0.0), ("again", 1.0)):
        loop.add(make_request(name, 8, 4, arrival_seconds=arrival))
    group = loop.state.groups["again"]
    firsts = []
    for count in range(4):
        group.num_preemptions = count
        loop.state.enqueue(group, 0.0)
        firsts.append(next(loop.state.policy.order(loop.state.queue, 0.0)).request.request_id)
    assert firsts == ["never", "again", "again", "never"]
    loop.run()


@pytest.mark.parametrize("policy", ["FairShare", "Priority"])
def test_eng_013_the_most_urgent_of_sixteen_runs_next(policy):
    loop = Loop(SchedulerSettings(policy=policy, max_sequences=10), make_capacity(400))
    for i in range(15):
        loop.add(make_request(f"r{i}", 6, 6 + i))
    loop.step()
    loop.add(make_request("urgent", 6, 4, priority=-100))
    while not loop.finished:
        loop.step()
    loop.step()
    assert loop.state.groups["urgent"].running
    loop.run()
    assert len(loop.finished) == 16


def test_eng_014_fenced_blocks_are_waited_for_instead_of_preempting_on():
    loop = Loop(
        SchedulerSettings(policy="Fifo", watermark_percent=0),
        make_capacity(16),
        overlap=True,
        optimistic=True,
    )
    for i in range(8):
        loop.add(make_request(f"r{i}", 6, 12))
    while loop.scheduler.has_work() or loop.flight:
        before = loop.state.counters.preemptions
        tokens = sum(len(outcome.tokens) for outcome in loop.outcomes.values())
        loop.step()
        assert loop.state.counters.preemptions - before <= 1
        if loop.state.counters.preemptions > before:
            loop.step()
            loop.step()
            assert sum(len(outcome.tokens) for outcome in loop.outcomes.values()) > tokens
    assert loop.preemptions
    for i in range(8):
        assert loop.output(f"r{i}") == expect(make_request(f"r{i}", 6, 12))


@pytest.mark.parametrize("overlap", [False, True])
def test_eng_015_a_full_pool_never_stalls(overlap):
    loop = Loop(SchedulerSettings(policy="Fifo", max_batch_tokens=64), make_capacity(40), overlap=overlap)
    fullest = 0
    for step in range(300):
        if step % 5 == 0:
            loop.add(make_request(f"r{step}", 12, 50))
        idle = loop.flight is None or not loop.flight[0].rows
        plan = loop.step()
        assert plan.rows or not idle, "neither this step nor the one in flight computes anything"
        fullest = max(fullest, loop.scheduler.counts().used_blocks)
    assert fullest >= 36
    loop.run()


@pytest.mark.parametrize("mode", ["Swap", "Recompute"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_eng_016_a_token_in_flight_at_preemption_counts_once(mode, size):
    settings = SchedulerSettings(policy="Fifo", preemption=mode, watermark_percent=0, max_batch_tokens=32)
    loop = Loop(settings, make_capacity(48 // size, size=size, host=64), overlap=True, optimistic=True)
    requests = [
        make_request(f"r{i}", 6, 20, sampling=SamplingParams(temperature=0, seed=i)) for i in range(6)
    ]
    for request in requests:
        loop.add(request)
    loop.run()
    assert loop.num_preempted_in_flight, "no sequence was preempted with a token in flight"
    for i, request in enumerate(requests):
        assert loop.output(request.request_id) == expect(request, i)
    loop.assert_idle()


def talk(tokens, seed):
    """End each output after a length of its own, by token 7."""
    del seed
    return 7 if crc(tokens[:20]) % 60 + 30 <= len(tokens) else 8 + crc(tokens) % (VOCABULARY - 8)


def test_eng_017_requests_without_limit_are_not_preempted_over_and_over():
    def serve(limited: bool) -> Loop:
        capacity = make_capacity(8 * 256 // 4, context=256)
        settings = SchedulerSettings(policy="Fifo", max_sequences=256)
        loop = Loop(settings, capacity, runner=TokenRunner(capacity, say=talk), check=False)
        for i in range(200):
            request = make_request(f"r{i}", 20, 256 - 20, stop=[7])
            limit = len(expect(request, talk=talk)) if limited else 256 - 20
            loop.add(make_request(f"r{i}", 20, max(limit, 1), stop=[7]))
        loop.run()
        return loop

    blind, knowing = serve(limited=False), serve(limited=True)
    assert len(blind.finished) == len(knowing.finished) == 200
    assert max(blind.preemptions.values(), default=0) <= blind.settings.max_preemptions
    assert knowing.num_steps >= 0.8 * blind.num_steps


def test_eng_018_ten_thousand_steps_of_random_arrivals_on_twelve_blocks():
    rng = random.Random(18)
    loop = Loop(SchedulerSettings(policy="Fifo", max_batch_tokens=16), make_capacity(12), check=False)
    number = 0
    for step in range(10_000):
        if rng.random() < 0.06:
            number += 1
            loop.add(make_request(f"r{number}", rng.randint(1, 30), rng.randint(1, 20)))
        if loop.scheduler.has_work():
            loop.step()  # the harness asserts that it plans something
        if step % 500 == 0:
            loop.check_now()
    loop.run()
    assert len(loop.finished) == number - len(loop.refusals) > 300
    assert loop.state.counters.failed_allocations <= 2 * number
    loop.assert_idle()


def test_eng_019_a_sequence_that_would_outgrow_the_pool_alone_ends_in_a_refusal():
    loop = Loop(capacity=make_capacity(12, context=256))
    refusal = loop.add(make_request("endless", 8, 200))
    assert refusal is not None
    assert refusal.reason is RefusalReason.KV_CAPACITY_EXCEEDED
    exact = make_request("exact", 8, 41)  # 48 stored tokens: every block of the pool
    assert loop.add(exact) is None
    assert loop.add(make_request("next", 8, 4)) is None
    loop.run()
    assert loop.output("exact") == expect(exact)
    assert loop.output("next") == expect(make_request("next", 8, 4))


@pytest.mark.parametrize("overlap", [False, True])
def test_eng_073_fifty_requests_under_pressure_with_swap(overlap):
    settings = SchedulerSettings(policy="Fifo", preemption="Swap", watermark_percent=0, max_preemptions=100)
    loop = Loop(settings, make_capacity(40, host=60), overlap=overlap, optimistic=True)
    requests = [make_request(f"r{i}", 5 + i % 9, 25) for i in range(50)]
    for request in requests:
        loop.add(request)
    loop.run()
    assert sum(bool(plan.swap_in) for plan in loop.plans) > 3
    for request in requests:
        assert loop.output(request.request_id) == expect(request)
    loop.assert_idle()


def test_eng_075_of_two_swapped_prompts_one_loads_and_the_other_waits_without_blocks():
    settings = SchedulerSettings(
        policy="Priority", preemption="Swap", watermark_percent=0, classes=LADDER, max_batch_tokens=8192
    )
    capacity = make_capacity(511, size=16, host=1100, context=8192)
    loop = Loop(settings, capacity, check=False)
    for name, length in (("first", 4096), ("second", 4080)):
        loop.add(make_request(name, length, 30, class_name="low"))
        loop.run_steps(2)
        loop.add(make_request(f"{name}-rival", 8100, 2, class_name="high"))  # wants the whole pool
        loop.step()
        assert loop.state.groups[name].host_blocks
        if name == "first":
            loop.state.queue.remove(loop.state.groups["first"])  # keep it out until the other is there too
            loop.abort("first-rival")
    loop.state.enqueue(loop.state.groups["first"], loop.now)
    loop.abort("second-rival")
    loop.state.cache.clear()
    loop.step()
    running = [name for name, group in loop.state.groups.items() if group.running]
    assert len(running) == 1
    (waiting,) = set(loop.state.groups) - set(running)
    assert loop.state.groups[waiting].host_blocks
    assert not any(sequence.table for sequence in loop.state.groups[waiting].waiting)
    loop.run()
    for name, length in (("first", 4096), ("second", 4080)):
        assert loop.output(name) == expect(make_request(name, length, 30))
    loop.assert_idle()


@pytest.mark.parametrize("overlap", [False, True])
def test_eng_076_swap_churn_frees_every_host_block_once(overlap):
    rng = random.Random(76)
    settings = SchedulerSettings(policy="Fifo", preemption="Swap", watermark_percent=0, max_preemptions=1000)
    loop = Loop(settings, make_capacity(24, host=30), overlap=overlap, optimistic=True)
    for step in range(600):
        if rng.random() < 0.3 and len(loop.state.queue) < 10:
            loop.add(make_request(f"r{step}", rng.randint(1, 20), rng.randint(1, 30)))
        if loop.state.groups and rng.random() < 0.05:
            loop.abort(rng.choice(list(loop.state.groups)))
            loop.scheduler.check_integrity()
        if loop.scheduler.has_work() or loop.flight:
            loop.step()  # checks tables, host blocks and what is read after each step
    loop.run()
    assert sum(len(plan.swap_in) for plan in loop.plans) > 20
    loop.assert_idle()


def test_the_cheaper_mode_is_chosen_and_kept_with_hysteresis():
    def serve(bytes_per_second: float) -> set[str]:
        settings = SchedulerSettings(policy="Fifo", watermark_percent=0, max_batch_tokens=64)
        capacity = make_capacity(24, host=40, speed=bytes_per_second)
        loop = Loop(settings, capacity)
        loop.add(make_request("measure", 60, 1))  # 6,400 tokens per second
        loop.run()
        for i in range(6):
            loop.add(make_request(f"r{i}", 12, 20))
        loop.run()
        return {preempted.mode.value for output in loop.outputs for preempted in output.preemptions}

    assert serve(1e9) == {"swap"}  # 16 KB both ways in 16 us, against about 12 tokens in 2 ms
    assert serve(1e5) == {"recompute"}
    assert serve(0.0) == {"recompute"}


def test_preemption_by_refusal_names_the_reason_and_frees_everything():
    settings = SchedulerSettings(policy="Fifo", preemption="Reject", watermark_percent=0)
    loop = Loop(settings, make_capacity(20))
    for i in range(6):
        loop.add(make_request(f"r{i}", 10, 20))
    loop.run()
    refused = [name for name, refusal in loop.refusals.items() if refusal.reason is RefusalReason.PREEMPTED]
    assert refused
    assert sorted(refused + loop.finished) == [f"r{i}" for i in range(6)]
    loop.assert_idle()


def test_after_its_last_preemption_a_request_is_left_alone():
    settings = SchedulerSettings(policy="Fifo", watermark_percent=0, max_preemptions=1)
    loop = Loop(settings, make_capacity(24))
    for i in range(12):
        loop.add(make_request(f"r{i}", 8, 40))
    loop.run()
    assert loop.preemptions
    assert set(loop.preemptions.values()) == {1}
    assert len(loop.finished) == 12


def test_overlap_leaves_no_step_empty_while_a_sequence_runs():
    loop = Loop(SchedulerSettings(policy="Fifo"), make_capacity(40), overlap=True)
    requests = [make_request("a", 5, 30), make_request("b", 9, 30)]
    for request in requests:
        loop.add(request)
    loop.run()
    assert [loop.output(request.request_id) for request in requests] == [
        expect(request) for request in requests
    ]
    working = loop.plans[: 1 + 29]
    assert [len(plan.rows) for plan in working] == [2] * 30, (
        "a token in flight must not hold back the next step"
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_eng_039_blocks_that_came_back_survive_a_wait_for_the_tail_block(overlap):
    """As far as this engine goes: the KV comes from host memory. It is whole again, and no slot is left for more."""
    settings = SchedulerSettings(
        policy="Priority", preemption="Swap", watermark_percent=0, classes=LADDER, max_batch_tokens=4096
    )
    loop = Loop(settings, make_capacity(14, size=4, host=20, context=256), overlap=overlap, optimistic=True)
    victim = make_request("victim", 39, 8, class_name="low")
    loop.add(victim)
    while not loop.outcomes.get(("victim", 0)):
        loop.step()
    loop.add(make_request("rival", 40, 12, class_name="high"))
    while not loop.state.groups["victim"].host_blocks:
        loop.step()
    held = list(loop.state.groups["victim"].host_blocks)
    assert len(held) >= 10
    while "rival" not in loop.finished:  # the pool is full: the host's copy waits, whole
        assert loop.state.groups["victim"].host_blocks == held
        loop.step()
    loop.state.cache.clear()
    first = len(loop.plans)
    loop.run()
    assert loop.output("victim") == expect(victim)
    moved = [move.host for plan in loop.plans for move in plan.swap_in]
    assert sorted(moved) == sorted(held), "each block came back exactly once"
    assert sum(plan.num_tokens for plan in loop.plans[first - 1 :]) <= victim.stop.max_tokens
    loop.assert_idle()


@pytest.mark.parametrize("when", ["planned", "read"])
def test_eng_030_an_abort_while_kv_comes_back_frees_it_when_the_step_ends(when):
    """As far as this engine goes: the KV comes from host memory, and the lease is the step that moves it."""
    settings = SchedulerSettings(
        policy="Priority", preemption="Swap", watermark_percent=0, classes=LADDER, max_batch_tokens=4096
    )
    loop = Loop(settings, make_capacity(14, size=4, host=20, context=256), optimistic=True)
    loop.add(make_request("victim", 39, 8, class_name="low"))
    while not loop.outcomes.get(("victim", 0)):
        loop.step()
    loop.add(make_request("rival", 40, 3, class_name="high"))
    while "rival" not in loop.finished:
        loop.step()
    loop.state.cache.clear()
    while not loop.state.groups["victim"].running:
        plan = loop.scheduler.plan(loop.now)
        result = loop.runner.run(plan)
        if plan.swap_in and when == "planned":
            assert loop.abort("victim")
            counts = loop.scheduler.counts()
            assert counts.used_blocks >= len(plan.swap_in), "the step still writes there"
        loop.take(loop.scheduler.update(plan, result, loop.now))
        if plan.swap_in and when == "read":
            assert loop.abort("victim")
        if plan.swap_in:
            break
    told = len(loop.outcomes["victim", 0].tokens)
    late = loop.scheduler.update(plan, result, loop.now)
    assert (late.sequences, late.finished_requests) == ((), ()), "a late completion must be ignored"
    assert len(loop.outcomes["victim", 0].tokens) == told
    loop.run()
    loop.assert_idle()
