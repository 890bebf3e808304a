"""Prefix cache: cases ENG-020 to ENG-029, ENG-037, ENG-040, ENG-050, ENG-051 and ENG-053 as far as the core goes."""

from __future__ import annotations

import random

import pytest
from tests.unit.millpond_engine.core.harness import Loop, expect, make_request

from millpond_engine.core import tree
from millpond_engine.records.capacity import Capacity
from millpond_engine.records.outputs import BlocksRemoved, BlocksStored, CacheCleared
from millpond_engine.records.request import SamplingParams
from millpond_engine.records.settings import ClassRule, SchedulerSettings, TenantRule

B = 16
PROMPT_LOGPROBS = SamplingParams(temperature=0.0, seed=0, num_prompt_logprobs=0)


def make_loop(
    num_blocks: int = 128, *, size: int = B, budget: int = 2048, context: int = 2048, **rest
) -> Loop:
    capacity = Capacity(num_blocks=num_blocks, block_tokens=size, max_model_tokens=context)
    settings = SchedulerSettings(policy="Fifo", max_batch_tokens=budget, watermark_percent=0, **rest)
    return Loop(settings, capacity)


def serve(loop: Loop, *requests) -> None:
    for request in requests:
        assert loop.add(request) is None
    loop.run()


def computed_rows(loop: Loop, first_plan: int = 0) -> list[int]:
    return [row.num_tokens for plan in loop.plans[first_plan:] for row in plan.rows]


@pytest.mark.parametrize(
    ("case", "namespaces"),
    [
        ("eng_020", [("model", "adapter", "image:a"), ("model", "adapter", "image:b")]),
        ("eng_021", [("model", "sql@digest1"), ("model", "sql@digest2")]),
        ("eng_024", [("tenant-a", "salt"), ("tenant-b", "salt")]),
    ],
)
def test_eng_020_021_024_the_namespace_is_part_of_the_key(case, namespaces):
    loop = make_loop()
    prompt = list(range(5 * B))
    for i, namespace in enumerate(namespaces):
        serve(loop, make_request(f"{case}-{i}", prompt, 4, namespace=namespace))
    assert list(loop.cached.values()) == [0, 0]
    serve(loop, make_request("again", prompt, 4, namespace=namespaces[0]))
    assert loop.cached["again"] == 5 * B - 1


class ConstantHash(bytes):
    def __hash__(self) -> int:
        return 7

    __eq__ = bytes.__eq__


def test_eng_022_a_constant_hash_lets_nothing_be_hit(monkeypatch):
    monkeypatch.setattr(tree, "make_child_key", lambda tokens, at, size: ConstantHash(tokens[at : at + size]))
    loop = make_loop()
    requests = [make_request(f"r{i}", 3 * B, 5) for i in range(20)]
    for request in requests:
        serve(loop, request)
    assert set(loop.cached.values()) == {0}
    for request in requests:
        assert loop.output(request.request_id) == expect(request)
    for i in range(5):  # the same first block, and then others: a hit of that block and no more
        tail = make_request(f"tail{i}", 2 * B).prompt
        branch = make_request(f"branch{i}", (*requests[3].prompt[:B], *tail), 5)
        serve(loop, branch)
        assert loop.cached[branch.request_id] == B
        assert loop.output(branch.request_id) == expect(branch)
    serve(loop, make_request("again", requests[4].prompt, 5))
    assert loop.cached["again"] == 3 * B - 1


def test_eng_023_another_tenant_sees_neither_hit_nor_speed():
    loop = make_loop()
    prompt = list(range(10 * B))
    for name, tenant in (("first", "a"), ("other", "b"), ("again", "a")):
        steps = len(loop.plans)
        serve(loop, make_request(name, prompt, 4, namespace=(tenant,), tenant=tenant))
        assert loop.plans[steps].num_tokens == (1 if name == "again" else 10 * B)
    assert loop.cached == {"first": 0, "other": 0, "again": 10 * B - 1}


def test_eng_026_freed_blocks_are_never_read():
    rng = random.Random(26)
    loop = make_loop(12, size=4, budget=16)
    bases = [[rng.randrange(1000) for _ in range(24)] for _ in range(3)]
    requests = []
    for step in range(400):
        if rng.random() < 0.3:
            prompt = [*rng.choice(bases)[: rng.randint(1, 24)], rng.randrange(1000)]
            requests.append(make_request(f"r{step}", prompt, rng.randint(1, 15)))
            loop.add(requests[-1])
        if loop.scheduler.has_work():
            loop.step()  # after each step the harness poisons free blocks, and checks each read
    loop.run()
    assert loop.state.cache.num_evicted > 50
    for request in requests:
        assert loop.output(request.request_id) == expect(request)


@pytest.mark.parametrize("overlap", [False, True])
def test_eng_027_duplicates_are_given_back_once_and_the_table_points_to_the_tree(overlap):
    capacity = Capacity(num_blocks=32, block_tokens=4, max_model_tokens=64)
    loop = Loop(SchedulerSettings(policy="Fifo"), capacity, overlap=overlap)
    prompt = list(range(9))
    twins = [make_request("plain", prompt, 12), make_request("twin", prompt, 12, sampling=PROMPT_LOGPROBS)]
    for twin in twins:  # prompt log-probabilities need every position computed, hence the duplicate
        loop.add(twin)
    loop.run_steps(3)
    plain, twin = (loop.state.groups[name].running[0] for name in ("plain", "twin"))
    assert plain.table[:2] == twin.table[:2]
    assert [loop.state.cache.pool.counts[block] for block in plain.table[:2]] == [2, 2]
    third = make_request("third", [900 + i for i in range(40)], 4)
    loop.add(third)
    loop.run()
    for request in (*twins, third):
        assert loop.output(request.request_id) == expect(request)
    loop.assert_idle()


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
@pytest.mark.parametrize("case", ["eng_028", "eng_037"])
def test_eng_028_037_a_full_hit_recomputes_exactly_the_last_token(case, num_blocks):
    loop = make_loop()
    request = make_request(case, num_blocks * B, 5)
    serve(loop, request)
    for again in range(2):
        first = len(loop.plans)
        repeated = make_request(f"{case}-{again}", request.prompt, 5)
        serve(loop, repeated)
        assert computed_rows(loop, first) == [1, 1, 1, 1, 1]
        assert loop.cached[repeated.request_id] == num_blocks * B - 1
        assert loop.output(repeated.request_id) == expect(request)


def test_a_full_hit_beside_the_owner_writes_to_a_copy():
    loop = make_loop(size=4)
    serve(loop, make_request("first", list(range(8)), 1))
    for i in range(3):
        loop.add(make_request(f"hit{i}", list(range(8)), 10))
    plan = loop.step()
    assert len(plan.copies) == 2, "two of three may not write to the block that the first of them holds"
    loop.run()
    for i in range(3):
        assert loop.output(f"hit{i}") == expect(make_request("first", list(range(8)), 10))
    loop.assert_idle()


def test_eng_029_a_resumed_prompt_is_planned_after_its_hit_is_known():
    classes = (ClassRule("high", priority=1), ClassRule("low", priority=0))
    capacity = Capacity(num_blocks=40, block_tokens=B, max_model_tokens=640)
    settings = SchedulerSettings(
        policy="Priority", classes=classes, watermark_percent=0, max_batch_tokens=100
    )
    loop = Loop(settings, capacity)
    prompt = make_request("source", 465).prompt
    serve(loop, make_request("prefix", prompt[:256], 1, class_name="low"))
    victim = make_request("victim", prompt, 8, class_name="low")
    loop.add(victim)
    loop.step()
    assert loop.cached == {"prefix": 0}
    loop.add(make_request("rival", 300, 4, class_name="high"))
    loop.step()
    assert loop.preemptions == {"victim": 1}
    loop.run()
    assert loop.cached["victim"] == 256
    assert loop.output("victim") == expect(victim)


LENGTHS = [1, B - 1, B, B + 1, 2 * B - 1, 2 * B, 39, 40, 41]


@pytest.mark.parametrize("budget", [1, B, 40])
@pytest.mark.parametrize("state", ["cold", "warm", "preempted"])
def test_eng_040_lengths_around_blocks_and_chunks(state, budget):
    for length in LENGTHS:
        loop = make_loop(8, budget=budget, context=128, max_sequences=4)
        request = make_request("r", length, 2 * B)
        if state == "warm":
            serve(loop, make_request("before", request.prompt, 1))
        loop.add(request)
        if state == "preempted":
            for _ in range(4 if budget > 1 else length + 3):
                loop.step()
            group = loop.state.groups["r"]
            _preempt(loop, group)
            loop.state.groups["r"].preempted_step = -1
        loop.run()
        assert loop.output("r") == expect(request)
        if state == "warm":
            assert loop.cached["r"] == min(length // B * B, length - 1)
        loop.assert_idle()


def _preempt(loop: Loop, group) -> None:
    from millpond_engine.core.builder import PlanBuilder
    from millpond_engine.core.preemption import preempt

    if group.running:
        preempt(loop.state, PlanBuilder(loop.state.step, 10), group, "Test", loop.now)


def test_eng_050_prompt_logprobs_twice_with_the_cache_on():
    loop = make_loop(size=4)
    for name in ("first", "second"):
        serve(loop, make_request(name, [1, 2, 3, 4, 5], 2, sampling=PROMPT_LOGPROBS))
    assert loop.prompt_logprobs["first"] == loop.prompt_logprobs["second"]
    assert len(loop.prompt_logprobs["first"]) == 4


def test_eng_051_prompt_logprobs_come_once_and_whole_with_the_last_chunk():
    loop = make_loop(size=4, budget=3)
    loop.add(make_request("r", 20, 2, sampling=PROMPT_LOGPROBS))
    for _ in range(6):
        loop.step()
        assert not loop.prompt_logprobs
        assert not loop.outcomes
    loop.run()
    assert [entry.logprob for entry in loop.prompt_logprobs["r"]] == [-float(p) for p in range(1, 20)]


def test_eng_053_a_prompt_of_one_token_has_no_prompt_logprobs():
    loop = make_loop(size=4)
    serve(loop, make_request("r", [3], 2, sampling=PROMPT_LOGPROBS))
    assert loop.prompt_logprobs["r"] == ()  # the server puts the null of position 0 before them


def test_requests_of_one_burst_share_a_prefix_that_is_computed_once():
    loop = make_loop(2000, context=1024, budget=512)
    systems = [make_request(f"system{i}", 10 * B).prompt for i in range(8)]
    for i in range(64):
        own = make_request(f"own{i}", 20).prompt
        loop.add(make_request(f"r{i}", (*systems[i // 8], *own), 4))
    loop.run()
    possible = (64 - 8) * 10 * B
    assert sum(loop.cached.values()) == possible


def test_a_waiting_twin_does_not_wait_for_a_peer_of_a_lower_class():
    classes = (ClassRule("high", priority=1), ClassRule("low", priority=0))
    settings = SchedulerSettings(policy="Priority", classes=classes, max_batch_tokens=32)
    loop = Loop(settings, Capacity(num_blocks=200, block_tokens=4, max_model_tokens=512))
    prompt = make_request("p", 200).prompt
    loop.add(make_request("low", prompt, 2, class_name="low"))
    loop.step()
    loop.add(make_request("high", prompt, 2, class_name="high"))
    loop.step()
    assert loop.state.groups["high"].running
    loop.run()


def test_a_tenant_beyond_its_share_is_evicted_first():
    capacity = Capacity(num_blocks=20, block_tokens=4, max_model_tokens=64)
    settings = SchedulerSettings(policy="Fifo", tenants=(TenantRule("greedy", max_cache_percent=25),))
    loop = Loop(settings, capacity)
    serve(loop, make_request("modest", 16, 1, tenant="modest"))
    serve(loop, make_request("greedy", 40, 1, tenant="greedy"))
    serve(loop, make_request("more", 40, 1, tenant="third"))
    removed = [e for output in loop.outputs for e in output.cache_events if isinstance(e, BlocksRemoved)]
    assert {event.reason for event in removed} == {"TenantShare"}
    serve(loop, make_request("again", make_request("modest", 16).prompt, 1, tenant="modest"))
    assert loop.cached["again"] == 15, "the oldest blocks stayed: their tenant is within its share"


def test_eviction_takes_the_least_recently_used_leaf():
    loop = make_loop(12, size=4, context=48)
    serve(loop, make_request("old", 16, 1), make_request("new", 16, 1))
    serve(loop, make_request("touch", make_request("old", 16).prompt, 1))
    serve(loop, make_request("large", 24, 1))
    serve(loop, make_request("old-again", make_request("old", 16).prompt, 1))
    serve(loop, make_request("new-again", make_request("new", 16).prompt, 1))
    assert loop.cached["old-again"] == 15
    assert loop.cached["new-again"] < 12


def test_events_replayed_give_the_blocks_that_are_findable():
    rng = random.Random(5)
    loop = make_loop(16, size=4, budget=32)
    bases = [[rng.randrange(1000) for _ in range(20)] for _ in range(4)]
    resident: dict[int, tuple] = {}
    for step in range(300):
        if rng.random() < 0.4:
            loop.add(make_request(f"r{step}", rng.choice(bases)[: rng.randint(4, 20)], rng.randint(1, 8)))
        if step == 150:
            events = loop.scheduler.reset_prefix_cache()
            assert events[-1] == CacheCleared(), "an idle engine must be able to tell at once"
            for event in events:
                _replay(event, resident, loop)
            assert resident == {}
        if not loop.scheduler.has_work():
            continue
        loop.step()
        for event in loop.outputs[-1].cache_events:
            _replay(event, resident, loop)
        assert set(resident) == {block for block, _ in loop.state.cache.tree.walk()}
    stored = [event for output in loop.outputs for event in output.cache_events]
    assert any(isinstance(event, BlocksStored) for event in stored[len(stored) // 2 :])


def _replay(event, resident: dict[int, tuple], loop: Loop) -> None:
    if isinstance(event, CacheCleared):
        resident.clear()
    elif isinstance(event, BlocksRemoved):
        for block in event.block_ids:
            del resident[block]
    else:
        assert isinstance(event, BlocksStored)
        assert event.parent_block_id is None or event.parent_block_id in resident, "parents come first"
        prefix = resident[event.parent_block_id] if event.parent_block_id is not None else ()
        assert tuple(event.prefix_tokens) == prefix
        for i, block in enumerate(event.block_ids):
            assert block not in resident, "a block is used again before its removal was told"
            prefix += event.tokens[4 * i : 4 * i + 4]
            resident[block] = prefix


def test_a_reset_keeps_running_sequences_right_and_publishes_nothing_old():
    loop = make_loop(size=4)
    request = make_request("r", 20, 30)
    loop.add(request)
    loop.run_steps(5)
    loop.scheduler.reset_prefix_cache()
    loop.run()
    assert loop.output("r") == expect(request)
    assert loop.scheduler.counts().cached_blocks == 0
    serve(loop, make_request("again", request.prompt, 2))
    assert loop.cached["again"] == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("length", [7681, 7680])
def test_eng_038_a_prompt_that_is_cached_to_its_end_still_plans_a_token(length, overlap):
    """As far as this engine goes: the lower tier is host memory, which holds swapped sequences."""
    classes = (ClassRule("high", priority=1), ClassRule("low"))
    capacity = Capacity(num_blocks=260, block_tokens=64, max_model_tokens=16384, num_host_blocks=200)
    settings = SchedulerSettings(
        policy="Priority", max_batch_tokens=16384, preemption="Swap", watermark_percent=0, classes=classes
    )
    loop = Loop(settings, capacity, overlap=overlap)
    prompt = make_request("base", length).prompt
    for name in ("cold", "warm", "again"):
        loop.add(make_request(name, prompt, 1, class_name="low"))
        loop.run()
        assert loop.output(name) == expect(make_request(name, prompt, 1))
    hit = min(length // 64 * 64, length - 1)
    assert [loop.cached[name] for name in ("cold", "warm", "again")] == [0, hit, hit]

    whole = make_request("swapped", prompt, 4, class_name="low")
    loop.add(whole)
    while ("swapped", 0) not in loop.outcomes:
        loop.step()
    loop.add(
        make_request("rival", 200 * 64 - 2, 2, class_name="high")
    )  # leaves 60 blocks of the prompt cached
    while "rival" not in loop.finished:
        loop.step()
    first = next(number for number, plan in enumerate(loop.plans) if plan.swap_in or plan.swap_out)
    loop.run()
    assert loop.output("swapped") == expect(whole)
    moved = [move for plan in loop.plans for move in plan.swap_in]
    assert 60 <= len(moved) <= 61, "the device had the first 60 blocks, the host the rest"
    rows = [row for plan in loop.plans[first:] for row in plan.rows if row.start < 64 * 190]
    assert all(row.num_tokens > 0 for row in rows)
    again = [row.num_tokens for row in rows if row.start > 0 and row.start + row.num_tokens <= length + 4]
    assert sum(again) <= 4, "what either tier held was computed again"
    loop.assert_idle()
