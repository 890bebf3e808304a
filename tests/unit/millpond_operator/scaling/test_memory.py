"""What is kept between decisions: start times, capacity, floors; and how it is forgotten."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.engine_states import make_engine_state

from millpond_operator.scaling.aggregate import EngineSample
from millpond_operator.scaling.learn import CapacityEstimate
from millpond_operator.scaling.memory import (
    Memory,
    ReplicaFacts,
    drop_holed_history,
    find_decode_capacity,
    note_decode,
    note_engines,
    note_floor,
    note_gateways,
    note_replicas,
    note_reuse,
    recall,
)
from millpond_operator.scaling.records import Demand, Recommended
from millpond_operator.scaling.starts import Start, StartSummary

NOW = 10_000.0


def facts(uid: str, *, created: float, ready: float | None, restarts: int = 0) -> ReplicaFacts:
    return ReplicaFacts(uid, created, ready, restarts)


def test_a_start_is_measured_once_from_creation_to_ready() -> None:
    memory = note_replicas(Memory(), [facts("a", created=NOW - 100, ready=NOW - 10)], NOW)
    again = note_replicas(memory, [facts("a", created=NOW - 100, ready=NOW - 5)], NOW + 15)
    assert again.starts == (Start("", 90.0),)


@pytest.mark.parametrize(
    "replica",
    [
        facts("restarted", created=NOW - 100, ready=NOW - 10, restarts=1),
        facts("flapped", created=NOW - 9_000, ready=NOW - 10),
        facts("clock", created=NOW, ready=NOW - 10),
        facts("pending", created=NOW - 100, ready=None),
    ],
    ids=lambda replica: replica.uid,
)
def test_what_is_no_start_is_not_measured(replica: ReplicaFacts) -> None:
    assert note_replicas(Memory(), [replica], NOW).starts == ()


def test_as_008_a_replica_is_unready_since_its_creation_or_since_it_was_lost() -> None:
    memory = note_replicas(Memory(), [facts("new", created=NOW - 3_600, ready=None)], NOW)
    assert memory.unready_since == {"new": NOW - 3_600}
    memory = note_replicas(Memory(), [facts("old", created=NOW - 3_600, ready=NOW - 3_500)], NOW)
    lost = note_replicas(memory, [facts("old", created=NOW - 3_600, ready=None)], NOW + 15)
    assert lost.unready_since == {"old": NOW + 15}
    later = note_replicas(lost, [facts("old", created=NOW - 3_600, ready=None)], NOW + 30)
    assert later.unready_since == {"old": NOW + 15}
    assert note_replicas(later, [], NOW + 45).timed == frozenset()


def test_a_gateway_that_restarts_is_known_anew() -> None:
    memory = note_gateways(Memory(), ["a/1", "b/1"], NOW)
    memory = note_gateways(memory, ["a/1", "b/2"], NOW + 15)
    assert memory.gateways_since == {"a/1": NOW, "b/2": NOW + 15}


def test_op_068_what_the_status_says_is_remembered() -> None:
    memory = recall(capacity=900, starts=(StartSummary("large", 240.0, 9),))
    assert memory.capacity.prefill_per_second == 900.0
    assert memory.starts == (Start("large", 240.0),) * 5, "as much evidence as a pool needs of its own"
    assert recall(capacity=None) == Memory()


def test_a_hole_starts_the_history_anew() -> None:
    memory = note_floor(Memory(), 5, NOW, window_seconds=300)
    assert drop_holed_history(memory, NOW + 60, max_gap_seconds=60) == memory
    assert drop_holed_history(memory, NOW + 61, max_gap_seconds=60).history == ()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60))
def test_the_shortened_history_has_the_maximum_of_the_whole_one(floors: list[int]) -> None:
    memory, whole = Memory(), []
    for number, floor in enumerate(floors):
        at = NOW + 15 * number
        memory = note_floor(memory, floor, at, window_seconds=150)
        whole.append(Recommended(at, floor))
        begin = at - 150
        assert max(r.replicas for r in memory.history if r.at >= begin) == max(
            r.replicas for r in whole if r.at >= begin
        )
        assert memory.history[0].at == whole[0].at, "since when the need is known"
    assert len(memory.history) <= 12


def demand(rate: float | None, *, backlog: int, ttft: float | None = None) -> Demand:
    return Demand(NOW, 1, 1, rate, rate, 0.0, 0, backlog, ttft_milliseconds=ttft)


def engines(waiting: int, num: int = 2, **changes: Any) -> list[EngineSample]:
    return [
        EngineSample(str(n), NOW, make_engine_state(waiting_tokens=waiting, **changes)) for n in range(num)
    ]


READY = {"0": NOW - 1_000, "1": NOW - 1_000}


def note(memory: Memory, waiting: int, seen: Demand | None, now: float, **changes: Any) -> Memory:
    values: dict[str, Any] = {"ready": READY, "speed": 1_000.0, "ttft_target": None}
    return note_engines(memory, engines(waiting), seen, now=now, **(values | changes))


def test_capacity_is_what_a_fleet_serves_while_work_waits_everywhere() -> None:
    memory = note(Memory(), 9_000, demand(2_000.0, backlog=20_000), NOW)
    assert memory.capacity.samples == ()
    memory = note(memory, 9_000, demand(2_000.0, backlog=26_000), NOW + 15)
    assert memory.capacity.samples == (800.0,)  # (2000 - 6000 / 15) over two replicas
    missed = note(memory, 9_000, demand(2_000.0, backlog=32_000, ttft=900.0), NOW + 30, ttft_target=700.0)
    assert missed.capacity.samples == pytest.approx((800.0, 720.0))


@pytest.mark.parametrize("waiting", [0, 1_500])
def test_a_fleet_that_is_not_busy_throughout_shows_no_limit(waiting: int) -> None:
    memory = note(Memory(), waiting, demand(300.0, backlog=waiting), NOW)
    memory = note(memory, waiting, demand(300.0, backlog=waiting), NOW + 15)
    assert memory.capacity.samples == ()
    assert memory.capacity.prefill_per_second == 1_000.0


def test_as_003_a_cold_or_a_changed_fleet_teaches_nothing() -> None:
    young = {"0": NOW - 1_000, "1": NOW - 20}
    memory = note(Memory(), 9_000, demand(100.0, backlog=20_000), NOW, ready=young)
    memory = note(memory, 9_000, demand(100.0, backlog=20_000), NOW + 15, ready=young)
    assert memory.capacity.samples == ()
    memory = note(Memory(), 9_000, demand(2_000.0, backlog=20_000), NOW, ready={"0": NOW - 1_000})
    memory = note(memory, 9_000, demand(2_000.0, backlog=20_000), NOW + 15)
    assert memory.capacity.samples == ()
    silent = note_engines(memory, engines(9_000, num=1), demand(2_000.0, backlog=0), ready=READY, speed=None,
                          ttft_target=None, now=NOW + 30)  # fmt: skip
    assert silent.tick is None
    assert note(memory, 9_000, None, NOW + 30).tick is None


def test_as_004_only_an_idle_fleet_shows_the_best_latency() -> None:
    memory = note(Memory(), 0, demand(10.0, backlog=0, ttft=90.0), NOW)
    memory = note(memory, 0, demand(10.0, backlog=0, ttft=90.0), NOW + 15)
    assert memory.capacity.best_idle_ttft == 90.0
    busy = note(Memory(capacity=CapacityEstimate()), 1_500, demand(500.0, backlog=3_000, ttft=300.0), NOW)
    busy = note(busy, 1_500, demand(500.0, backlog=3_000, ttft=300.0), NOW + 15)
    assert busy.capacity.best_idle_ttft is None


def test_output_speed_is_capacity_only_in_a_full_batch() -> None:
    half = engines(0, decode=50.0, num_running=1)
    assert find_decode_capacity(note_decode(Memory(), half, max_sequences=256)) is None
    full = engines(0, decode=4_000.0, num_running=256, num_waiting=3)
    memory = note_decode(Memory(), full, max_sequences=256)
    assert find_decode_capacity(memory) == 4_000.0
    assert len(replace(memory, decode_samples=memory.decode_samples * 99).decode_samples) > 32
    assert (
        len(note_decode(replace(memory, decode_samples=(1.0,) * 99), full, max_sequences=256).decode_samples)
        == 32
    )


def hits(uid: str, tokens: int | None, at: float, *, epoch: str = "1" * 16) -> EngineSample:
    return EngineSample(uid, at, make_engine_state(prefix_hit_tokens=tokens, epoch=epoch))


def test_as_018_prefix_hits_are_counted_over_whole_windows() -> None:
    memory = note_reuse(Memory(), [hits("a", 1_000, NOW)])
    assert memory.reuse["a"].per_second is None, "nothing is known before a window is whole"
    memory = note_reuse(memory, [hits("a", 4_000, NOW + 30)])
    assert memory.reuse["a"].per_second is None
    memory = note_reuse(memory, [hits("a", 7_000, NOW + 60)])
    assert memory.reuse["a"].per_second == 100.0
    memory = note_reuse(memory, [hits("a", 7_500, NOW + 90)])
    assert memory.reuse["a"].per_second == 100.0, "of the last whole one"
    restarted = note_reuse(memory, [hits("a", 9_000, NOW + 120, epoch="2" * 16)])
    assert restarted.reuse["a"].per_second is None
    assert note_reuse(memory, [hits("a", None, NOW + 120)]).reuse == {}, "an engine that does not count"
    assert note_reuse(memory, []).reuse == {}
