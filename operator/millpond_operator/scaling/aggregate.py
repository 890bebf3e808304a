"""Reports of gateways and states of engines, put together into what a decision reads. Missing is never zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from millpond_common.contract.engine_state import EngineState
from millpond_common.contract.gateway_report import PoolReport
from millpond_operator.scaling.records import Demand, KvLoad

WINDOW_SECONDS = 60.0
"""Longest window of a rate: after that long without a request an absent rate is a true zero."""


@dataclass(frozen=True, slots=True)
class GatewaySample:
    """What one gateway said about the pool."""

    gateway: str
    """UID of its pod and epoch of its process: with either its counters began anew."""
    at: float
    """Time of the fetch."""
    report: PoolReport


@dataclass(frozen=True, slots=True)
class EngineSample:
    """What one engine said."""

    pod_uid: str
    at: float
    state: EngineState


def make_demand(
    samples: Sequence[GatewaySample],
    *,
    num_expected: int,
    known_since: Mapping[str, float],
    targets: Mapping[str, int | None],
    now: float,
) -> Demand | None:
    """Sum what all gateways saw; None when none said anything.

    A gateway whose windows are not full counts as not reporting: the sum over the others may raise a count and may
    not lower it.

    Args:
        samples: the latest of each gateway.
        num_expected: gateways that take requests.
        known_since: by gateway, when its counters were seen first.
        targets: TTFT target in milliseconds by class.
        now: time of the decision.
    """
    if not samples:
        return None
    reports = [sample.report for sample in samples]
    full = [report for report in reports if _find_rates(report) is not None]
    ages = [report.last_request_seconds_ago for report in reports]
    seen = [age + now - s.at for age, s in zip(ages, samples, strict=True) if age is not None]
    idle = [*seen, *(now - known_since.get(s.gateway, now) for s in samples if not _has_request(s.report))]
    return Demand(
        observed_at=min(sample.at for sample in samples),
        gateways_reporting=len(full),
        gateways_expected=num_expected,
        uncached_per_second_15=_sum(report.uncached_tokens_per_second_15 for report in map(_mend, reports)),
        uncached_per_second_60=_sum(report.uncached_tokens_per_second_60 for report in map(_mend, reports)),
        output_per_second=_sum(report.output_tokens_per_second_60 for report in map(_mend, reports)),
        held_tokens=sum(report.held_tokens for report in reports),
        queued_tokens=sum(report.queued_tokens for report in reports),
        held_requests=sum(report.held_requests for report in reports),
        ttft_milliseconds=_find_worst_ttft(reports, targets),
        idle_seconds=min(idle) if len(samples) >= num_expected > 0 else None,
        last_request_seconds=min(seen, default=None),
    )


def make_kv(samples: Sequence[EngineSample], *, num_ready: int) -> KvLoad | None:
    """KV blocks in use over the ready replicas; None when none said anything.

    A ready replica that did not answer counts as the fullest of those that did: it holds some blocks, nobody knows
    how many, and it must not make the pool look emptier.
    """
    tiers = [sample.state.device for sample in samples if sample.state.device.total > 0]
    if not tiers:
        return None
    missing = max(0, num_ready - len(tiers))
    return KvLoad(
        observed_at=min(sample.at for sample in samples),
        used_blocks=sum(tier.in_use for tier in tiers) + missing * max(tier.in_use for tier in tiers),
        blocks_per_replica=min(tier.total for tier in tiers),
        replicas_reporting=len(tiers),
    )


def find_speed(states: Sequence[EngineState], reports: Sequence[PoolReport]) -> float | None:
    """Prefill speed of a typical replica, uncached tokens per second: the engines' own measure, else the gateways'."""
    own = [state.speeds.prefill_tokens_per_second for state in states]
    seen = [entry.speed_tokens_per_second for report in reports for entry in report.endpoints]
    return _find_low_median(own) or _find_low_median(seen)


def _find_low_median(values: Sequence[float | None]) -> float | None:
    known = sorted(value for value in values if value is not None and math.isfinite(value) and value > 0)
    return known[(len(known) - 1) // 2] if known else None


def _has_request(report: PoolReport) -> bool:
    return report.last_request_seconds_ago is not None


def _find_rates(report: PoolReport) -> tuple[float, float] | None:
    mended = _mend(report)
    fast, slow = _clean(mended.uncached_tokens_per_second_15), _clean(mended.uncached_tokens_per_second_60)
    return None if fast is None or slow is None else (fast, slow)


def _mend(report: PoolReport) -> PoolReport:
    """An absent rate is zero where the gateway knows that nothing came for a whole window, and unknown elsewhere."""
    last = report.last_request_seconds_ago
    quiet = last is not None and last > WINDOW_SECONDS and report.held_requests == 0

    def mend(rate: float | None) -> float | None:
        return 0.0 if quiet and _clean(rate) is None else rate

    return PoolReport(
        pool=report.pool,
        endpoints=(),
        uncached_tokens_per_second_15=mend(report.uncached_tokens_per_second_15),
        uncached_tokens_per_second_60=mend(report.uncached_tokens_per_second_60),
        output_tokens_per_second_60=mend(report.output_tokens_per_second_60),
    )


MAX_RATE = 1e15
"""Tokens per second; more is a fault of the gateway, and two such numbers have no sum."""


def _clean(rate: float | None) -> float | None:
    """A number, or None: a mean over nothing is no number, and neither is one that nothing can reach."""
    return rate if rate is not None and 0 <= rate <= MAX_RATE else None


def _sum(rates: object) -> float | None:
    known = [rate for rate in map(_clean, rates) if rate is not None]  # type: ignore[call-overload]
    return math.fsum(known) if known else None


def _find_worst_ttft(reports: Sequence[PoolReport], targets: Mapping[str, int | None]) -> float | None:
    """p90 of the class that misses its target most; classes without one count only where none has one."""
    seen: dict[str, int] = {}
    for report in reports:
        for name, value in report.ttft_p90_milliseconds.items():
            seen[name] = max(value, seen.get(name, 0))
    judged = {name: value for name, value in seen.items() if targets.get(name)} or seen
    compare: Callable[[str], float] = lambda name: judged[name] / (targets.get(name) or 1)  # noqa: E731
    return float(judged[max(judged, key=compare)]) if judged else None
