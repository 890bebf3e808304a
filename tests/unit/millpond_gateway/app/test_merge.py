"""One truth out of several workers'."""

from __future__ import annotations

import msgspec
import pytest

from millpond_common.contract.gateway_report import EndpointReport, GatewayReport, PoolReport
from millpond_gateway.app.merge import (
    WorkerState,
    add_totals,
    find_totals,
    merge_metrics,
    merge_reports,
    parse_metrics,
)
from millpond_gateway.flow.demand import DemandBook

ENDPOINT = EndpointReport("p", "u", "r", "Both", True, 2, 300, 1000.0, 64, 32, "e")
POOL = PoolReport(
    pool="a",
    endpoints=(ENDPOINT,),
    uncached_tokens_per_second_15=10.0,
    uncached_tokens_per_second_60=20.0,
    output_tokens_per_second_60=5.0,
    held_requests=1,
    held_tokens=100,
    queued_tokens=300,
    last_request_seconds_ago=4.0,
)


def make_state(
    *pools: PoolReport, first_tokens: dict[str, dict[str, list[int]]] | None = None
) -> WorkerState:
    report = GatewayReport("w", "x", 50.0, 1.5, True, pools)
    return WorkerState(report=report, first_tokens=first_tokens or {}, ready=True)


def test_loads_and_rates_add_up_and_common_truths_are_taken_once() -> None:
    other = msgspec.structs.replace(POOL, last_request_seconds_ago=1.0)
    merged = merge_reports([make_state(POOL), make_state(other)], gateway="pod", epoch="e1")
    pool = merged.pools[0]
    assert (merged.gateway, merged.epoch, merged.synced) == ("pod", "e1", True)
    assert (pool.uncached_tokens_per_second_15, pool.output_tokens_per_second_60) == (20.0, 10.0)
    assert (pool.held_requests, pool.held_tokens, pool.queued_tokens) == (2, 200, 600)
    assert pool.last_request_seconds_ago == 1.0
    endpoint = pool.endpoints[0]
    assert (endpoint.open_requests, endpoint.uncached_tokens) == (4, 600)
    assert (endpoint.speed_tokens_per_second, endpoint.cached_tokens) == (1000.0, 64)


def test_a_rate_that_one_worker_does_not_know_yet_is_unknown_not_half() -> None:
    young = msgspec.structs.replace(POOL, uncached_tokens_per_second_60=None)
    pool = merge_reports([make_state(POOL), make_state(young)], gateway="g", epoch="e").pools[0]
    assert pool.uncached_tokens_per_second_60 is None
    assert pool.uncached_tokens_per_second_15 == 20.0
    missing = merge_reports([make_state(POOL), make_state()], gateway="g", epoch="e").pools[0]
    assert missing.uncached_tokens_per_second_15 is None
    assert missing.held_tokens == 100


def test_percentiles_come_from_all_times_together() -> None:
    slow, fast, together = DemandBook(0.0), DemandBook(0.0), DemandBook(0.0)
    for book, seconds, count in ((slow, 2.0, 5), (fast, 0.1, 95)):
        for _ in range(count):
            book.first_token("interactive", seconds, 1.0)
            together.first_token("interactive", seconds, 1.0)
    states = [make_state(POOL, first_tokens={"a": book.count_first_tokens(1.0)}) for book in (slow, fast)]
    merged = merge_reports(states, gateway="g", epoch="e").pools[0].ttft_p90_milliseconds
    assert merged == together.view(1.0).ttft_p90_milliseconds
    assert merged["interactive"] < 200


PAGE = """\
# HELP millpond_gateway_requests_total Finished requests.
# TYPE millpond_gateway_requests_total counter
millpond_gateway_requests_total{pool="a"} %d
# HELP millpond_gateway_request_seconds Seconds.
# TYPE millpond_gateway_request_seconds histogram
millpond_gateway_request_seconds_bucket{le="1.0"} 1
millpond_gateway_request_seconds_bucket{le="+Inf"} 2
millpond_gateway_request_seconds_count 2
millpond_gateway_request_seconds_sum 3.5
# HELP millpond_gateway_open_requests Open.
# TYPE millpond_gateway_open_requests gauge
millpond_gateway_open_requests 3
# HELP millpond_gateway_view_age_seconds Age.
# TYPE millpond_gateway_view_age_seconds gauge
millpond_gateway_view_age_seconds %d
"""


@pytest.mark.parametrize("ended", [0, 7])
def test_counters_histograms_and_parts_add_up_and_a_workers_end_takes_nothing_back(ended: int) -> None:
    pages = [parse_metrics(PAGE % (10, 1)), parse_metrics(PAGE % (20, 5))]
    gone = find_totals(parse_metrics(PAGE % (ended, 9))) if ended else {}
    families = {family.name: family for family in merge_metrics(pages, add_totals({}, gone))}
    values = {
        (sample.name, tuple(sample.labels.items())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    times = 3 if ended else 2
    assert values["millpond_gateway_requests_total", (("pool", "a"),)] == 30 + ended
    assert values["millpond_gateway_request_seconds_sum", ()] == 3.5 * times
    assert values["millpond_gateway_request_seconds_bucket", (("le", "+Inf"),)] == 2 * times
    assert values["millpond_gateway_open_requests", ()] == 6
    assert values["millpond_gateway_view_age_seconds", ()] == 5
