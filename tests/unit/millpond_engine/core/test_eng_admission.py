"""Admission and starvation: cases ENG-001 to ENG-010, and what is refused at once."""

from __future__ import annotations

import pytest
from tests.unit.millpond_engine.core.harness import Loop, expect, make_request

from millpond_engine.records.capacity import Capacity
from millpond_engine.records.request import RefusalReason, SamplingParams, WaitReason
from millpond_engine.records.settings import ClassRule, SchedulerSettings

CLASSES = (ClassRule("interactive", priority=100), ClassRule("batch", priority=0))


def rows_of(loop: Loop, request_id: str) -> set[int]:
    return {sequence.row for sequence in loop.state.groups[request_id].running}


def tokens_for(loop: Loop, plan, request_id: str) -> int:
    rows = rows_of(loop, request_id) if request_id in loop.state.groups else set()
    return sum(row.num_tokens for row in plan.rows if row.row in rows)


def test_eng_001_decodes_get_a_token_in_every_step_while_long_prompts_arrive():
    capacity = Capacity(num_blocks=16_000, block_tokens=16, max_model_tokens=8192)
    loop = Loop(SchedulerSettings(max_batch_tokens=8192, policy="Fifo"), capacity, check=False)
    for i in range(30):
        loop.add(make_request(f"short{i}", 20, 60))
    loop.run_steps(2)
    for number in range(30):
        loop.add(make_request(f"long{number}", 3000 + 100 * number, 4))
        before = {i: len(loop.output(f"short{i}")) for i in range(30)}
        loop.step()
        assert all(len(loop.output(f"short{i}")) == count + 1 for i, count in before.items())
    loop.run()
    loop.assert_idle()


def test_eng_002_short_requests_pass_a_long_prefill_and_it_advances_too():
    capacity = Capacity(num_blocks=3000, block_tokens=4, max_model_tokens=12_000)
    loop = Loop(SchedulerSettings(max_batch_tokens=8, policy="Fifo"), capacity, check=False)
    loop.add(make_request("long", 10_000, 1))
    loop.run_steps(20)
    loop.add(make_request("unblocked", 4, 3))
    loop.add(make_request("new", 4, 3))
    for _ in range(8):
        plan = loop.step()
        assert tokens_for(loop, plan, "long") > 0
    assert loop.output("unblocked")
    assert loop.output("new")


def test_eng_003_a_short_prompt_gets_its_slice_behind_a_long_one():
    capacity = Capacity(num_blocks=500, block_tokens=16, max_model_tokens=8192)
    settings = SchedulerSettings(max_batch_tokens=64, policy="Fifo")
    loop = Loop(settings, capacity, check=False)
    loop.add(make_request("long", 6000, 4))
    loop.run_steps(20)
    loop.add(make_request("short", 101, 4))
    slice_tokens = 64 * settings.admission_percent // 100
    loop.run_steps(-(-101 // slice_tokens) + 3)
    assert loop.output("short")
    assert not loop.outcomes.get(("long", 0))


def test_eng_004_a_heavy_head_is_passed_a_bounded_number_of_times():
    capacity = Capacity(num_blocks=200, block_tokens=4, max_model_tokens=1000)
    settings = SchedulerSettings(policy="Fifo", max_batch_tokens=4096, max_bypasses=5)
    loop = Loop(settings, capacity)
    loop.add(make_request("holder", 580, 20))
    loop.run_steps(1)
    loop.add(make_request("heavy", 400, 4, arrival_seconds=1.0))
    started = []
    for i in range(40):
        loop.add(make_request(f"light{i}", 20, 8, arrival_seconds=2.0 + i))
        loop.step()
        started += [
            name for name in loop.state.groups if loop.state.groups[name].running and name not in started
        ]
        if "heavy" in started:
            break
    passed = [name for name in started[: started.index("heavy")] if name.startswith("light")]
    assert 0 < len(passed) <= 5
    assert loop.state.groups["heavy"].num_bypasses == 0
    assert loop.state.counters.bypasses == len(passed)
    loop.run()


def test_eng_005_a_prompt_larger_than_the_pool_is_refused_at_once():
    capacity = Capacity(num_blocks=63, block_tokens=16, max_model_tokens=4096)
    loop = Loop(SchedulerSettings(policy="Fifo"), capacity)
    refusal = loop.add(make_request("large", 64 * 16, 1))
    assert refusal is not None
    assert refusal.reason is RefusalReason.KV_CAPACITY_EXCEEDED
    assert loop.add(make_request("small", 10, 4)) is None
    loop.step()
    assert loop.output("small")
    loop.run()
    assert loop.scheduler.counts().num_waiting == 0


def test_eng_006_prompt_and_output_together_beyond_the_pool_are_refused_with_both_numbers():
    capacity = Capacity(num_blocks=63, block_tokens=16, max_model_tokens=1024)
    loop = Loop(SchedulerSettings(policy="Fifo"), capacity)
    refusal = loop.add(make_request("edge", 1000, 24))
    assert refusal is not None
    assert refusal.reason is RefusalReason.KV_CAPACITY_EXCEEDED
    assert "64 blocks" in refusal.message
    assert "63" in refusal.message
    assert (
        loop.add(make_request("fits", 1000, 9)) is None
    )  # 1,008 stored tokens: the last one's KV is not needed
    loop.run()
    assert loop.preemptions == {}
    assert len(loop.output("fits")) == 9


def test_eng_007_refusals_leave_the_pool_answering():
    capacity = Capacity(num_blocks=50, block_tokens=16, max_model_tokens=2048)
    loop = Loop(SchedulerSettings(policy="Fifo"), capacity)
    for i in range(10):
        loop.add(make_request(f"first{i}", 12, 50))
    loop.run()
    refusals = [loop.add(make_request(f"second{i}", 1002, 10)) for i in range(5)]
    assert all(refusal and refusal.reason is RefusalReason.KV_CAPACITY_EXCEEDED for refusal in refusals)
    loop.add(make_request("third", 12, 5))
    loop.run()
    assert len(loop.output("third")) == 5
    loop.assert_idle()


def test_eng_008_every_step_of_a_chunked_prompt_holds_the_decode_too():
    capacity = Capacity(num_blocks=600, block_tokens=16, max_model_tokens=8192)
    loop = Loop(SchedulerSettings(policy="Fifo", max_batch_tokens=256), capacity, check=False)
    loop.add(make_request("short", 10, 64))
    loop.run_steps(2)
    loop.add(make_request("long", 5000, 2))
    while not loop.outcomes.get(("long", 0)):
        plan = loop.step()
        assert plan.rows[0].num_tokens == 1, "decodes come first"
        assert tokens_for(loop, plan, "short") == 1
        assert len(plan.rows) == 2 or loop.outcomes.get(("long", 0))


def test_eng_009_an_idle_pool_and_a_queue_never_survive_a_step():
    capacity = Capacity(num_blocks=32, block_tokens=4, max_model_tokens=128)
    loop = Loop(SchedulerSettings(policy="Fifo"), capacity)
    for i in range(4):
        loop.add(make_request(f"burst{i}", 24, 4))
    loop.run_steps(1)
    for i in range(6):
        loop.add(make_request(f"later{i}", 60, 20))
    loop.step()
    assert loop.scheduler.counts().num_waiting == 6
    for queue in loop.scheduler.counts().queues:
        assert set(queue.waiting) <= {WaitReason.CAPACITY.value}
    for i in range(4):
        loop.abort(f"burst{i}")
    assert loop.scheduler.counts().num_running == 0
    plan = loop.step()
    assert plan.rows
    loop.run()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", ["FairShare", "Priority", "Deadline", "LongestPrefix"])
def test_eng_010_a_higher_class_takes_a_slot_though_blocks_are_ample(policy, overlap):
    capacity = Capacity(num_blocks=2000, block_tokens=16, max_model_tokens=4096)
    settings = SchedulerSettings(policy=policy, max_sequences=4, classes=CLASSES)
    loop = Loop(settings, capacity, overlap=overlap)
    for i in range(4):
        loop.add(make_request(f"batch{i}", 30, 2000, class_name="batch"))
    loop.run_steps(5)
    loop.add(make_request("urgent", 10, 3, class_name="interactive"))
    loop.run_steps(4)
    assert loop.output("urgent")
    assert sum(loop.preemptions.values()) == 1
    assert loop.state.counters.failed_allocations == 0
    for i in range(4):
        assert loop.abort(f"batch{i}")


def test_eng_010_fifo_ignores_classes():
    loop = Loop(SchedulerSettings(policy="Fifo", max_sequences=1, classes=CLASSES))
    loop.add(make_request("batch", 4, 10, class_name="batch"))
    loop.step()
    loop.add(make_request("urgent", 4, 2, class_name="interactive"))
    loop.run()
    assert loop.finished == ["batch", "urgent"]
    assert loop.preemptions == {}


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "rest"),
    [
        ([], 4, {}),
        ([5], -1, {}),
        ([5000], 4, {}),
        ([-1], 4, {}),
        ([5], 4, {"n": 0}),
        ([5], 4, {"best_of": 0}),
        ([5], 0, {"n": 2}),
    ],
)
def test_eng_044_values_without_meaning_are_refused(prompt, max_tokens, rest):
    capacity = Capacity(num_blocks=64, block_tokens=4, max_model_tokens=256, vocabulary_size=1000)
    loop = Loop(capacity=capacity)
    refusal = loop.add(make_request("bad", prompt, max_tokens, **rest))
    assert refusal is not None
    assert refusal.reason is RefusalReason.INVALID_VALUE
    assert not loop.scheduler.has_work()


def context_loop() -> Loop:
    return Loop(capacity=Capacity(num_blocks=64, block_tokens=4, max_model_tokens=100))


def test_eng_056_a_prompt_beyond_the_context_is_refused():
    refusal = context_loop().add(make_request("r", 101, 1))
    assert refusal is not None
    assert refusal.reason is RefusalReason.CONTEXT_LENGTH_EXCEEDED
    assert "101" in refusal.message
    assert "100" in refusal.message


def test_eng_057_a_prompt_of_the_whole_context_only_without_output():
    loop = context_loop()
    refusal = loop.add(make_request("output", 100, 1))
    assert refusal is not None
    assert refusal.reason is RefusalReason.CONTEXT_LENGTH_EXCEEDED
    assert loop.add(make_request("none", 100, 0)) is None
    loop.run()
    assert loop.outcomes["none", 0].finish == "length"
    assert loop.output("none") == []


@pytest.mark.parametrize("case", ["eng_058", "eng_059"])
def test_eng_058_059_one_token_fits_behind_a_prompt_one_below_the_context(case):
    loop = context_loop()
    request = make_request(case, 99, 1)  # the server turns "no limit" into what is left of the context
    assert loop.add(request) is None
    loop.run()
    assert loop.output(case) == expect(request)
    assert loop.outcomes[case, 0].finish == "length"


@pytest.mark.parametrize("budget", [3, 64])
def test_eng_060_prompt_logprobs_without_output(budget):
    loop = Loop(SchedulerSettings(policy="Fifo", max_batch_tokens=budget))
    sampling = SamplingParams(temperature=0.0, num_prompt_logprobs=2)
    loop.add(make_request("echo", 10, 0, sampling=sampling))
    loop.run()
    assert [entry.logprob for entry in loop.prompt_logprobs["echo"]] == [-float(p) for p in range(1, 10)]
    assert loop.output("echo") == []
    loop.assert_idle()


def test_a_full_queue_refuses_with_the_time_its_tokens_take():
    settings = SchedulerSettings(policy="Fifo", max_queued_requests=3, max_sequences=1, max_batch_tokens=32)
    loop = Loop(settings)
    loop.add(make_request("warm", 32, 2))
    loop.run()
    for i in range(3):
        assert loop.add(make_request(f"r{i}", 30, 4)) is None
    refusal = loop.add(make_request("late", 30, 4))
    assert refusal is not None
    assert refusal.reason is RefusalReason.OVERLOADED
    assert refusal.retry_after_seconds == pytest.approx(90 / 3200)
    loop.run()


def test_a_request_id_in_use_is_refused():
    loop = Loop()
    assert loop.add(make_request("same", 4, 4)) is None
    refusal = loop.scheduler.add(make_request("same", 5, 4), 0.0)
    assert refusal is not None
    assert refusal.reason is RefusalReason.INVALID_VALUE
    loop.run()
    assert loop.finished == ["same"]
