"""What the scheduler costs and what paging buys, without a model: the core against its goals and naive peers.

Run: python -m benchmarks.engine_scheduler [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import Figure, compare, report

from millpond_engine.core.blocks import count_blocks
from millpond_engine.core.scheduler import Scheduler
from millpond_engine.core.tree import PrefixTree
from millpond_engine.records.capacity import Capacity
from millpond_engine.records.request import Request, SamplingParams, StopParams
from millpond_engine.records.settings import SchedulerSettings
from millpond_engine.records.step import RowResult, StepPlan, StepResult

BLOCK_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, seed=0)


def make_request(number: int, prompt: tuple[int, ...], max_tokens: int) -> Request:
    """A greedy request of one of eight tenants."""
    return Request(f"r{number}", prompt, GREEDY, StopParams(max_tokens), 0.0, tenant=f"t{number % 8}")


def make_prompt(rng: random.Random, length: int) -> tuple[int, ...]:
    """Random tokens."""
    return tuple(rng.randrange(32_000) for _ in range(length))


def answer(plan: StepPlan) -> StepResult:
    """The least a runner can say."""
    rows = tuple(RowResult(row.row, token=row.start % 997) for row in plan.rows if row.sample)
    return StepResult(plan.step, rows, 0.01)


def measure_step(num_running: int, num_waiting: int, steps: int) -> list[float]:
    """Seconds of plan and update together, with every sequence decoding."""
    rng = random.Random(1)
    capacity = Capacity(num_running * 80, BLOCK_TOKENS, 8192)
    scheduler = Scheduler(SchedulerSettings(max_sequences=num_running, max_batch_tokens=8192), capacity)
    for number in range(num_running + num_waiting):
        assert scheduler.add(make_request(number, make_prompt(rng, 512), 600), 0.0) is None
    plan = scheduler.plan(0.0)
    while plan.num_tokens != num_running or len(plan.rows) != num_running:
        scheduler.update(plan, answer(plan), 0.0)
        plan = scheduler.plan(0.0)
    scheduler.update(plan, answer(plan), 0.0)
    gc.collect()
    gc.disable()
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        plan = scheduler.plan(0.0)
        planned = time.perf_counter()
        result = answer(plan)
        answered = time.perf_counter()
        scheduler.update(plan, result, 0.0)
        seconds.append(planned - started + time.perf_counter() - answered)
        assert len(plan.rows) == num_running
    gc.enable()
    return seconds


def time_best(function: Callable[[], object], repeats: int) -> float:
    """Shortest of several runs, in seconds."""
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - started)
    return best


def measure_lookup(length: int, num_others: int) -> float:
    """Seconds to look up a cached prompt of `length` tokens beside `num_others` cached prompts that share half of it."""
    rng = random.Random(2)
    num_blocks = length // BLOCK_TOKENS
    tree = PrefixTree((num_others + 1) * num_blocks, BLOCK_TOKENS)
    prompt = array("I", make_prompt(rng, length))
    free = iter(range((num_others + 1) * num_blocks))
    for number in range(num_others + 1):
        other = (
            prompt
            if number == 0
            else prompt[: length // 2] + array("I", make_prompt(rng, length - length // 2))
        )
        tree.insert(("bench",), None, 0, other.tobytes(), [next(free) for _ in range(num_blocks)])
    data = prompt.tobytes()
    assert len(tree.lookup(("bench",), data)) == num_blocks
    return time_best(lambda: tree.lookup(("bench",), data), 200)


@dataclass
class Paging:
    """Averages over the steps in which the pool was under load."""

    concurrent: float
    waste: float


def measure_paging(pool_tokens: int, num_requests: int, max_model_tokens: int) -> Paging:
    """Serve prompts of 64 to 256 tokens with 32 to 160 output tokens; the server does not know the output lengths."""
    rng = random.Random(3)
    capacity = Capacity(pool_tokens // BLOCK_TOKENS, BLOCK_TOKENS, max_model_tokens)
    scheduler = Scheduler(SchedulerSettings(max_sequences=1024, max_batch_tokens=4096), capacity)
    ends: dict[str, int] = {}
    for number in range(num_requests):
        prompt = make_prompt(rng, rng.randint(64, 256))
        ends[f"r{number}"] = rng.randint(32, 160)
        scheduler.add(make_request(number, prompt, max_model_tokens - len(prompt)), 0.0)
    generated = dict.fromkeys(ends, 0)
    running: list[int] = []
    wastes: list[float] = []
    while scheduler.has_work():
        plan = scheduler.plan(0.0)
        output = scheduler.update(plan, answer(plan), 0.0)
        counts = scheduler.counts()
        if counts.num_waiting:
            running.append(counts.num_running)
            wastes.append(1 - counts.running_tokens / (counts.used_blocks * BLOCK_TOKENS))
        for news in output.sequences:
            generated[news.request_id] += 1
            if generated[news.request_id] == ends[news.request_id]:
                scheduler.stop_sequence(news.request_id, 0, 0.0)
    return Paging(statistics.fmean(running), statistics.fmean(wastes))


def measure_sharing() -> tuple[int, int]:
    """Cached and cacheable prompt tokens: 8 system prompts of 512 tokens, 64 requests each, all at once."""
    rng = random.Random(4)
    scheduler = Scheduler(SchedulerSettings(max_sequences=256), Capacity(20_000, BLOCK_TOKENS, 4096))
    systems = [make_prompt(rng, 512) for _ in range(8)]
    for number in range(512):
        prompt = systems[number % 8] + make_prompt(rng, rng.randint(16, 64))
        assert scheduler.add(make_request(number, prompt, 32), 0.0) is None
    cached = 0
    while scheduler.has_work():
        plan = scheduler.plan(0.0)
        cached += sum(prompt.cached_tokens for prompt in scheduler.update(plan, answer(plan), 0.0).prompts)
    return cached, 8 * 63 * 512


def measure() -> list[Figure]:
    """All figures."""
    return [*measure_steps(), *measure_lookups(), *measure_memory()]


def measure_steps() -> list[Figure]:
    """One step of 256 decodes, without and with a queue."""
    figures = []
    for num_waiting in (0, 512):
        milliseconds = statistics.median(measure_step(256, num_waiting, 300)) * 1e3
        name = f"scheduler step, 256 decodes, {num_waiting} waiting (median)"
        figures.append(Figure(name, milliseconds, "ms", goal="<= 1", met=milliseconds <= 1))
    return figures


def measure_lookups() -> list[Figure]:
    """A lookup's time follows the prompt and nothing else."""
    short, long = measure_lookup(2048, 50), measure_lookup(32_768, 50)
    few, many = measure_lookup(8192, 2), measure_lookup(8192, 200)
    goal = "ratio <= 20 (16 times the tokens)"
    return [
        at_most("prefix lookup, 32k against 2k tokens", long * 1e6, short * 1e6, 20, goal),
        at_most("prefix lookup, 200 against 2 other prompts", many * 1e6, few * 1e6, 1.5, "ratio <= 1.5"),
    ]


def at_most(name: str, value: float, peer: float, bound: float, goal: str) -> Figure:
    """Microseconds whose ratio to others has an upper bound."""
    return Figure(name, value, "us", peer, value / peer, goal, value / peer <= bound)


def measure_memory() -> list[Figure]:
    """What paging wastes, what it gains over reservation, and what sharing finds."""
    pool_tokens, max_model_tokens = 65_536, 2048
    paging = measure_paging(pool_tokens, 1500, max_model_tokens)
    reserved = pool_tokens / (count_blocks(max_model_tokens, BLOCK_TOKENS) * BLOCK_TOKENS)
    cached, possible = measure_sharing()
    against = "concurrent sequences, against reserving 2048 tokens each"
    repeated = "cached prompt tokens, against all that repeat"
    return [
        Figure("paging waste", paging.waste * 100, "%", goal="<= 4", met=paging.waste <= 0.04),
        compare(against, paging.concurrent, "sequences", peer=reserved, at_least=3),
        compare(repeated, cached, "tokens", peer=possible, at_least=0.95),
    ]


def main() -> int:
    """Print the figures; write them as JSON when asked. Exit status 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    return report(measure(), options.json)


if __name__ == "__main__":
    sys.exit(main())
