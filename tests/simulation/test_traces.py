from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from millpond_simulator.clock import Clock
from millpond_simulator.engine import EngineModel, FakeEngine, Job
from millpond_simulator.fleet import Outcome
from millpond_simulator.generate import AGENT, CHAT, WORKLOADS, generate_trace
from millpond_simulator.results import compute_throughput, pick_percentile
from millpond_simulator.trace import (
    BLOCK_TOKENS,
    TraceError,
    TraceRequest,
    compute_oracle_hit_rate,
    read_trace,
    speed_up,
    write_trace,
)

PUBLIC_LINES = """\
{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]}

{"timestamp": 3052, "input_length": 7319, "output_length": 490, "hash_ids": [0, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27], "extra": 1}
"""


def test_files_in_the_public_form_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(PUBLIC_LINES)
    first, second = read_trace(path)
    assert (first.input_length, second.timestamp, len(second.hash_ids)) == (6758, 3052, 15)
    assert len(first.block_keys) == 13
    assert first.block_keys[0] == second.block_keys[0]


def test_a_trace_survives_writing_and_reading(tmp_path: Path) -> None:
    requests = generate_trace(msgspec.structs.replace(CHAT, num_requests=50), seed=4)
    write_trace(tmp_path / "t.jsonl", requests)
    assert read_trace(tmp_path / "t.jsonl") == requests


def test_an_unreadable_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp": 0}\n')
    with pytest.raises(TraceError, match=r"bad.jsonl, line 1"):
        read_trace(path)


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_generated_traces_have_the_forms_invariants(name: str) -> None:
    workload = msgspec.structs.replace(WORKLOADS[name], num_requests=400)
    trace = generate_trace(workload, seed=2)
    assert trace == generate_trace(workload, seed=2)
    assert trace != generate_trace(workload, seed=3)
    assert [t.timestamp for t in trace] == sorted(t.timestamp for t in trace)
    parents: dict[int, int | None] = {}
    for request in trace:
        assert len(request.hash_ids) == -(-request.input_length // BLOCK_TOKENS)
        before = None
        for hash_id in request.hash_ids:
            assert parents.setdefault(hash_id, before) == before  # an id names one prefix
            before = hash_id


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_no_generated_prompt_is_longer_than_the_workload_allows(name: str) -> None:
    most = 20_000
    workload = msgspec.structs.replace(WORKLOADS[name], num_requests=400, max_input_tokens=most)
    lengths = [request.input_length for request in generate_trace(workload, seed=2)]
    assert max(lengths) == most  # one turn alone would be longer
    assert lengths.count(most) < len(lengths) / 3


def test_agents_share_more_than_chats() -> None:
    rates = [
        compute_oracle_hit_rate(generate_trace(msgspec.structs.replace(w, num_requests=600), seed=1))
        for w in (CHAT, AGENT)
    ]
    assert 0.3 < rates[0] < 0.75 < rates[1] < 0.95


def test_the_oracle_counts_leading_blocks_only() -> None:
    first = TraceRequest(0, 3 * BLOCK_TOKENS, 1, (0, 1, 2))
    same_head = TraceRequest(1, 3 * BLOCK_TOKENS, 1, (0, 3, 2))
    assert compute_oracle_hit_rate([first, same_head]) == pytest.approx(1 / 6)
    assert compute_oracle_hit_rate([]) == 0.0


def test_speeding_up_keeps_order_and_content() -> None:
    request = TraceRequest(9000, 1, 1, ())
    assert speed_up([request], 3.0)[0].timestamp == 3000


def test_the_clock_runs_in_order_of_time_then_of_scheduling() -> None:
    clock = Clock()
    seen: list[tuple[float, str]] = []
    for time, name in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (5.0, "late")):
        clock.at(time, lambda name=name: seen.append((clock.now, name)))  # type: ignore[misc]
    clock.run(until=3.0)
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "c")]
    assert clock.now == 3.0


def make_engine(**fields: object) -> tuple[Clock, FakeEngine]:
    clock = Clock()
    defaults = {"tokens_per_second": 1000.0, "prefill_seconds": 0.0, "num_blocks": 4, "block_tokens": 100}
    return clock, FakeEngine("u0", EngineModel(**{**defaults, **fields}), clock)  # type: ignore[arg-type]


def submit(clock: Clock, engine: FakeEngine, keys: list[int], firsts: list[float]) -> Job:
    job = Job(
        keys=keys,
        num_tokens=len(keys) * engine.model.block_tokens,
        output_tokens=1,
        on_first_token=lambda _: firsts.append(clock.now),
        on_end=lambda _: None,
    )
    engine.submit(job)
    return job


def test_prefills_run_one_after_another_and_reuse_what_is_cached() -> None:
    clock, engine = make_engine()
    firsts: list[float] = []
    submit(clock, engine, [1, 2], firsts)
    warm = submit(clock, engine, [1, 2, 3], firsts)
    clock.run()
    assert firsts == pytest.approx([0.2, 0.3])
    assert warm.cached_tokens == 200


def test_the_cache_drops_the_oldest_tail_first() -> None:
    clock, engine = make_engine()
    firsts: list[float] = []
    for keys in ([1, 2, 3], [7, 8], [1, 2, 3]):
        job = submit(clock, engine, keys, firsts)
        clock.run()
    assert job.cached_tokens == 200  # block 3 went when 8 came
    assert engine.num_cached_blocks == 4


def make_outcome(arrived_at: float, ended_at: float, output_tokens: int) -> Outcome:
    return Outcome(arrived_at, 1.0, ended_at, 100, 0, 0, output_tokens, "u0")


def test_throughput_counts_what_came_while_requests_arrived() -> None:
    early, late = make_outcome(0.0, 5.0, 400), make_outcome(10.0, 12.0, 50)
    assert compute_throughput([early, late]) == pytest.approx(40.0)
    half_done = make_outcome(4.0, 15.0, 1000)  # the first token at 5, so half of it until 10
    assert compute_throughput([early, half_done, late]) == pytest.approx(90.0)
    assert compute_throughput([half_done]) == pytest.approx(1000 * 1.0 / 11.0)


def test_percentiles_are_nearest_ranks() -> None:
    values = [float(n) for n in range(1, 101)]
    assert (pick_percentile(values, 50), pick_percentile(values, 99), pick_percentile([3.0], 99)) == (
        50,
        99,
        3,
    )
