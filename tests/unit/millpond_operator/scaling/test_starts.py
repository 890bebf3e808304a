"""Start times by kind of node, and the floor for bursts that no start is fast enough for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond_operator.scaling.learn import DEFAULT_HORIZON_SECONDS, compute_warm_floor
from millpond_operator.scaling.starts import (
    ENOUGH_STARTS,
    MAX_KINDS,
    Start,
    find_horizon,
    find_start_seconds,
    name_node_kind,
    recall_starts,
    summarise_starts,
)


def starts(kind: str, seconds: float, num: int = ENOUGH_STARTS) -> tuple[Start, ...]:
    return (Start(kind, seconds),) * num


def test_as_021_as_022_each_kind_of_node_has_its_own_start_time() -> None:
    own = starts("small", 40.0) + starts("large", 900.0)
    assert find_horizon(own, (), {"small"}) == 40.0
    assert find_horizon(own, (), {"large"}) == 900.0
    assert find_horizon(own, (), {"small", "large"}) == 900.0, "the next one may land on either"
    assert find_start_seconds(own, (), {"small"}) == 40.0


def test_a_pool_at_zero_counts_on_the_kind_it_used_last() -> None:
    assert find_horizon(starts("large", 900.0) + starts("small", 40.0), (), ()) == 40.0
    assert find_start_seconds((), (), ()) is None
    assert find_horizon((), (), ()) == DEFAULT_HORIZON_SECONDS


def test_a_new_pool_of_a_known_model_starts_with_what_others_measured() -> None:
    others = starts("large", 900.0) + starts("small", 40.0)
    assert find_horizon((), others, {"large"}) == 900.0
    assert find_start_seconds((), others, {"large"}) == 900.0
    own = starts("large", 60.0)
    assert find_horizon(own, others, {"large"}) == 60.0, "five of its own need nobody else's"
    assert find_horizon(own[:1], others, {"large"}) == 900.0


def test_a_kind_never_seen_counts_on_the_long_default_or_on_what_is_known() -> None:
    assert find_horizon((), (), {"new"}) == DEFAULT_HORIZON_SECONDS
    assert find_horizon(starts("small", 40.0), (), {"new"}) == 40.0


def test_a_summary_brings_back_the_same_times() -> None:
    own = starts("large", 900.0, 9) + starts("small", 40.0, 2)
    found = summarise_starts(own)
    assert [(s.node_kind, s.seconds, s.num_starts) for s in found] == [
        ("small", 40.0, 2),
        ("large", 900.0, 9),
    ]
    again = recall_starts(found)
    for kinds in ({"small"}, {"large"}, set()):
        assert find_start_seconds(again, (), kinds) == find_start_seconds(own, (), kinds)
    many = tuple(Start(str(n), 1.0) for n in range(20))
    assert len(summarise_starts(many)) == MAX_KINDS


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        ({"node.kubernetes.io/instance-type": "a3", "nvidia.com/gpu.product": "H200"}, "a3/H200"),
        ({"node.kubernetes.io/instance-type": "m7i", "kubernetes.io/arch": "amd64"}, "m7i"),
        ({"kubernetes.io/arch": "arm64"}, "arm64"),
        ({}, ""),
    ],
)
def test_a_node_is_named_by_what_it_says_of_itself(labels: dict[str, str], kind: str) -> None:
    assert name_node_kind(labels) == kind


def find_floor(rates: list[float], *, horizon: float = 120.0) -> int:
    return compute_warm_floor(rates, interval_seconds=15.0, horizon_seconds=horizon, capacity=1_000.0)


CALM, BURST = [100.0] * 20, [4_500.0] * 2


def test_bursts_shorter_than_a_start_keep_a_warm_floor() -> None:
    assert find_floor((CALM + BURST) * 3 + CALM) == 5


def test_without_a_measured_capacity_there_is_no_floor() -> None:
    rates = (CALM + BURST) * 3 + CALM
    assert compute_warm_floor(rates, interval_seconds=15.0, horizon_seconds=60.0, capacity=None) == 0


def test_what_a_start_can_follow_is_no_burst() -> None:
    long = [4_500.0] * 20
    assert find_floor((CALM + long) * 4 + CALM) == 0
    assert find_floor([4_500.0] * 200) == 0
    assert find_floor([0.0] * 200) == 0
    assert find_floor((CALM + long) * 4 + CALM, horizon=600.0) == 5, (
        "a slower start makes the same load a burst"
    )


def test_one_or_two_bursts_are_chance_and_one_that_runs_is_not_over() -> None:
    assert find_floor((CALM + BURST) * 2 + CALM) == 0
    assert find_floor((CALM + BURST) * 3) == 0
    assert find_floor(BURST) == 0, "too short a record says nothing"


@given(st.lists(st.floats(0, 50_000), max_size=240), st.floats(1, 3_600))
def test_a_floor_never_passes_the_highest_rate(rates: list[float], horizon: float) -> None:
    assert 0 <= find_floor(rates, horizon=horizon) <= max(rates, default=0.0) / 1_000.0 + 1
