"""One report and one page of metrics for all workers of a gateway. Pure.

Counts and loads are each worker's own and add up; what every worker sees alike, as a replica's speed or the age of
the view, is taken once, at its worst. Percentiles come from the workers' summed histograms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from millpond_common.contract.gateway_report import (
    EndpointReport,
    GatewayReport,
    PoolReport,
    RevisionReport,
)
from millpond_gateway.flow.demand import compute_percentile

Labels = tuple[tuple[str, str], ...]
Totals = dict[tuple[str, Labels], float]
"""Samples of counters and histograms, by name and labels."""
_SUMMED_GAUGES = frozenset(
    {
        "millpond_gateway_open_requests",
        "millpond_gateway_client_connections",
        "millpond_gateway_engine_connections",
        "millpond_gateway_buffered_body_bytes",
    }
)
"""Parts of a whole; every other gauge is one truth that several see."""


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker tells its supervisor."""

    report: GatewayReport
    first_tokens: dict[str, dict[str, list[int]]]
    """Histogram of times to first token, by pool and class; see `flow.demand`."""
    ready: bool


def merge_reports(states: Sequence[WorkerState], *, gateway: str, epoch: str) -> GatewayReport:
    """The report of all workers; at least one."""
    reports = [state.report for state in states]
    names = sorted({pool.pool for report in reports for pool in report.pools})
    return GatewayReport(
        gateway=gateway,
        epoch=epoch,
        observed_at=min(report.observed_at for report in reports),
        view_age_seconds=max(report.view_age_seconds for report in reports),
        synced=all(report.synced for report in reports),
        pools=tuple(_merge_pool(name, states) for name in names),
    )


def _merge_pool(name: str, states: Sequence[WorkerState]) -> PoolReport:
    pools = [pool for state in states for pool in state.report.pools if pool.pool == name]
    whole = len(pools) == len(states)  # a worker that does not know the pool yet counts none of it
    uids = list(dict.fromkeys(endpoint.pod_uid for pool in pools for endpoint in pool.endpoints))
    changes = {
        "endpoints": tuple(_merge_endpoint(uid, pools) for uid in uids),
        "held_requests": sum(pool.held_requests for pool in pools),
        "held_tokens": sum(pool.held_tokens for pool in pools),
        "queued_tokens": sum(pool.queued_tokens for pool in pools),
        "ttft_p90_milliseconds": _merge_times(name, states),
        "last_request_seconds_ago": min(
            (pool.last_request_seconds_ago for pool in pools if pool.last_request_seconds_ago is not None),
            default=None,
        ),
    }
    for field in _RATES:
        rates = [getattr(pool, field) for pool in pools]
        changes[field] = sum(rates) if whole and None not in rates else None
    return msgspec.structs.replace(_merge_revisions(pools), **changes)


_RATES = (
    "uncached_tokens_per_second_15",
    "uncached_tokens_per_second_60",
    "output_tokens_per_second_60",
)


def _merge_endpoint(uid: str, pools: Iterable[PoolReport]) -> EndpointReport:
    found = [entry for pool in pools for entry in pool.endpoints if entry.pod_uid == uid]
    speeds = [entry.speed_tokens_per_second for entry in found if entry.speed_tokens_per_second is not None]
    return msgspec.structs.replace(
        found[0],
        routable=any(entry.routable for entry in found),
        open_requests=sum(entry.open_requests for entry in found),
        uncached_tokens=sum(entry.uncached_tokens for entry in found),
        speed_tokens_per_second=sum(speeds) / len(speeds) if speeds else None,
        cached_tokens=max(entry.cached_tokens for entry in found),
        unique_cached_tokens=max(entry.unique_cached_tokens for entry in found),
        epoch=next((entry.epoch for entry in found if entry.epoch is not None), None),
    )


def _merge_times(pool: str, states: Sequence[WorkerState]) -> dict[str, int]:
    summed: dict[str, list[int]] = {}
    for state in states:
        for name, counts in state.first_tokens.get(pool, {}).items():
            before = summed.get(name, [0] * len(counts))
            summed[name] = [left + right for left, right in zip(before, counts, strict=True)]
    percentiles = {name: compute_percentile(counts, 0.9) for name, counts in summed.items()}
    return {name: round(1000 * seconds) for name, seconds in percentiles.items() if seconds is not None}


def _merge_revisions(pools: Sequence[PoolReport]) -> PoolReport:
    """The first pool's report with the trials of all."""
    found: dict[str, RevisionReport] = {}
    for entry in (entry for pool in pools for entry in pool.revisions):
        before = found.get(entry.revision)
        found[entry.revision] = entry if before is None else _add_trials(before, entry)
    return msgspec.structs.replace(pools[0], revisions=tuple(found.values()))


def _add_trials(left: RevisionReport, right: RevisionReport) -> RevisionReport:
    counts: dict[int, int] = {}
    for bound, count in (*left.ttft_counts, *right.ttft_counts):
        counts[bound] = counts.get(bound, 0) + count
    return RevisionReport(
        left.revision,
        left.num_requests + right.num_requests,
        left.num_failed + right.num_failed,
        tuple(sorted(counts.items())),
    )


# Metrics.


def parse_metrics(text: str) -> list[Metric]:
    """Families of one worker's page."""
    return list(text_string_to_metric_families(text))


def find_totals(families: Iterable[Metric]) -> Totals:
    """What a worker counted: it stays counted when the worker ends."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        if family.type in {"counter", "histogram"}
        for sample in family.samples
    }


def add_totals(left: Totals, right: Totals) -> Totals:
    """Sum of two."""
    return left | {key: left.get(key, 0.0) + value for key, value in right.items()}


def merge_metrics(pages: Sequence[Sequence[Metric]], ended: Totals) -> list[Metric]:
    """Families of all workers; `ended` is what workers that are no more had counted."""
    merged: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, Labels], float]] = {}
    for family in (family for page in pages for family in page):
        merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
        join = _choose_join(family)
        samples = values.setdefault(family.name, {})
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            samples[key] = join(samples[key], sample.value) if key in samples else sample.value
    for (name, labels), value in ended.items():
        owner = next((family for family in merged.values() if _owns(family, name)), None)
        if owner is not None:
            samples = values[owner.name]
            samples[name, labels] = samples.get((name, labels), 0.0) + value
    for family_name, samples in values.items():
        for (name, labels), value in samples.items():
            merged[family_name].add_sample(name, dict(labels), value)
    return list(merged.values())


def _choose_join(family: Metric) -> Callable[[float, float], float]:
    if family.name.endswith("_created"):
        return min
    if family.type in {"counter", "histogram"} or family.name in _SUMMED_GAUGES:
        return lambda left, right: left + right
    return max


def _owns(family: Metric, sample: str) -> bool:
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}.get(family.type, ())
    return any(sample == family.name + suffix for suffix in suffixes)
