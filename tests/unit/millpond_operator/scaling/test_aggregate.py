"""Reports and states into demand and KV load; missing is never zero."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.support.engine_states import make_engine_state

from millpond_common.contract.gateway_report import EndpointReport, PoolReport
from millpond_operator.scaling.aggregate import EngineSample, GatewaySample, find_speed, make_demand, make_kv
from millpond_operator.scaling.records import Demand
from millpond_operator.scaling.victim import compute_cached_value

NOW = 1_000.0


def sample(name: str = "g", *, at: float = NOW, **changes: Any) -> GatewaySample:
    values: dict[str, Any] = {
        "uncached_tokens_per_second_15": 100.0,
        "uncached_tokens_per_second_60": 80.0,
        "output_tokens_per_second_60": 20.0,
        "last_request_seconds_ago": 1.0,
    }
    return GatewaySample(name, at, PoolReport("smol", (), **(values | changes)))


def add_up(*samples: GatewaySample, expected: int | None = None, **changes: Any) -> Demand:
    values: dict[str, Any] = {"known_since": {}, "targets": {}, "now": NOW}
    demand = make_demand(
        samples, num_expected=len(samples) if expected is None else expected, **(values | changes)
    )
    assert demand is not None
    return demand


def test_op_067_demand_is_the_sum_over_all_gateways() -> None:
    demand = add_up(
        sample("a", held_requests=1, held_tokens=10),
        sample("b", queued_tokens=5, last_request_seconds_ago=400.0),
        sample("c", held_requests=2, held_tokens=7, at=NOW - 10),
    )
    assert (demand.uncached_per_second_15, demand.uncached_per_second_60, demand.output_per_second) == (
        300.0,
        240.0,
        60.0,
    )
    assert (demand.held_requests, demand.held_tokens, demand.queued_tokens, demand.backlog_tokens) == (
        3,
        17,
        5,
        22,
    )
    assert demand.observed_at == NOW - 10
    assert demand.idle_seconds == 1.0


def test_no_report_is_no_demand() -> None:
    assert make_demand((), num_expected=2, known_since={}, targets={}, now=NOW) is None


def test_a_gateway_whose_window_is_not_full_adds_and_does_not_count_as_reporting() -> None:
    young = sample("b", uncached_tokens_per_second_15=50.0, uncached_tokens_per_second_60=None)
    demand = add_up(sample("a"), young)
    assert demand.uncached_per_second_15 == 150.0
    assert (demand.gateways_reporting, demand.gateways_expected) == (1, 2)


@pytest.mark.parametrize("rate", [None, math.nan, math.inf, -1.0])
def test_op_053_a_mean_over_nothing_is_zero_only_where_nothing_came(rate: float | None) -> None:
    rates = dict.fromkeys(("uncached_tokens_per_second_15", "uncached_tokens_per_second_60"), rate)
    quiet = add_up(sample(**rates, last_request_seconds_ago=3_600.0))
    assert (quiet.uncached_per_second_15, quiet.gateways_reporting) == (0.0, 1)
    busy = add_up(sample(**rates, last_request_seconds_ago=2.0))
    assert (busy.uncached_per_second_15, busy.gateways_reporting) == (None, 0)
    held = add_up(sample(**rates, last_request_seconds_ago=3_600.0, held_requests=1))
    assert held.uncached_per_second_15 is None
    unknown = add_up(sample(**rates, last_request_seconds_ago=None))
    assert unknown.uncached_per_second_15 is None


def test_a_gateway_that_never_saw_a_request_is_idle_since_it_is_known() -> None:
    never: dict[str, Any] = {"last_request_seconds_ago": None}
    demand = add_up(sample("a", **never), sample("b", **never), known_since={"a": NOW - 700, "b": NOW - 50})
    assert demand.idle_seconds == 50.0
    assert demand.last_request_seconds is None
    assert add_up(sample("a", **never), known_since={}).idle_seconds == 0.0


def test_idleness_needs_every_gateway() -> None:
    assert add_up(sample(last_request_seconds_ago=900.0), expected=2).idle_seconds is None


def test_the_class_that_misses_its_target_most_is_reported() -> None:
    slow = sample("a", ttft_p90_milliseconds={"interactive": 900, "batch": 60_000})
    other = sample("b", ttft_p90_milliseconds={"interactive": 400, "agent": 1_500})
    targets = {"interactive": 700, "agent": 2_000, "batch": None}
    assert add_up(slow, other, targets=targets).ttft_milliseconds == 900.0
    assert add_up(slow, targets={}).ttft_milliseconds == 60_000.0
    assert add_up(sample()).ttft_milliseconds is None


def test_as_009_a_silent_replica_counts_as_the_fullest_that_answered() -> None:
    states = [
        EngineSample(str(n), NOW - n, make_engine_state(in_use=used)) for n, used in enumerate((100, 300))
    ]
    kv = make_kv(states, num_ready=3)
    assert kv is not None
    assert (kv.used_blocks, kv.blocks_per_replica, kv.replicas_reporting, kv.observed_at) == (
        700,
        1000,
        2,
        NOW - 1,
    )
    assert make_kv([], num_ready=3) is None


def test_speed_is_measured_by_engines_or_else_seen_by_gateways() -> None:
    def report(speed: float | None) -> PoolReport:
        endpoint = EndpointReport("p", "u", "r", "both", True, 0, 0, speed_tokens_per_second=speed)
        return PoolReport("smol", (endpoint,))

    states = [make_engine_state(prefill=speed) for speed in (900.0, None, 1_100.0)]
    assert find_speed(states, [report(5.0)]) == 900.0
    assert find_speed([make_engine_state(prefill=None)], [report(700.0), report(None)]) == 700.0
    assert find_speed([], [report(None)]) is None


def test_as_018_what_others_hold_as_well_is_no_value() -> None:
    assert compute_cached_value(6_000, cached_tokens=1_000, unique_tokens=500) == 3_000.0
    assert compute_cached_value(6_000, cached_tokens=1_000, unique_tokens=0) == 0.0
    assert compute_cached_value(6_000, cached_tokens=0, unique_tokens=0) == 6_000.0


RATES = st.none() | st.floats(allow_nan=True, allow_infinity=True)


@example([(1.7e308, 1.7e308, None), (1.7e308, 1.7e308, None)])
@given(st.lists(st.tuples(RATES, RATES, st.none() | st.floats(0, 1e6)), min_size=1, max_size=5))
def test_whatever_gateways_say_sums_are_numbers_and_losing_one_never_looks_complete(
    said: list[tuple[float | None, float | None, float | None]],
) -> None:
    samples = [
        sample(
            str(n),
            uncached_tokens_per_second_15=fast,
            uncached_tokens_per_second_60=slow,
            last_request_seconds_ago=ago,
        )
        for n, (fast, slow, ago) in enumerate(said)
    ]
    demand = add_up(*samples)
    for rate in (demand.uncached_per_second_15, demand.uncached_per_second_60):
        assert rate is None or (math.isfinite(rate) and rate >= 0)
    fewer = make_demand(samples[1:], num_expected=len(samples), known_since={}, targets={}, now=NOW)
    assert fewer is None or fewer.gateways_reporting < fewer.gateways_expected


def test_a_report_in_json_has_no_number_that_is_none() -> None:
    """NaN cannot even be written: it becomes null, which is absence."""
    encoded = msgspec.json.encode(sample(uncached_tokens_per_second_15=math.nan).report)
    assert msgspec.json.decode(encoded, type=PoolReport).uncached_tokens_per_second_15 is None
