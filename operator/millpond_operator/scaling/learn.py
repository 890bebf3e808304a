"""What is learned from observation: capacity of a replica, time to start one, and how bursty the demand is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from millpond_operator.scaling.records import Capacity

WARM_SECONDS = 120.0
"""A replica's first two minutes are slow (cold caches, autotuning) and teach nothing."""
BUSY_SHARE = 0.5
"""Below this share of the believed capacity an interval says nothing about the limit."""
MAX_SAMPLES = 64
QUANTILE = 0.25
"""Capacity is a low quantile of what busy replicas served: it must hold most of the time."""
DEFAULT_HORIZON_SECONDS = 300.0
BURST_RATIO = 2.0
MIN_BURSTS = 3
BURST_QUANTILE = 0.9


@dataclass(frozen=True, slots=True)
class Interval:
    """What one replica did in one interval."""

    served_per_second: float
    """Uncached prompt tokens per second."""
    busy_share: float
    """Share of the interval in which prompt work was waiting or running, 0..1."""
    age_seconds: float
    """Of the replica, since Ready."""
    ttft_milliseconds: float | None = None


@dataclass(frozen=True, slots=True)
class CapacityEstimate:
    """Capacity with the samples behind it; bounded."""

    samples: tuple[float, ...] = ()
    profile: float | None = None
    """From the engine's own measured speed, until busy intervals were seen."""
    best_idle_ttft: float | None = None

    @property
    def prefill_per_second(self) -> float | None:
        """Low quantile of the samples, or the profile."""
        if not self.samples:
            return self.profile
        ordered = sorted(self.samples)
        return ordered[min(int(len(ordered) * QUANTILE), len(ordered) - 1)]

    def to_capacity(self, decode_per_second: float | None = None) -> Capacity:
        """The record a decision reads."""
        return Capacity(self.prefill_per_second, decode_per_second, self.best_idle_ttft)


def learn_capacity(
    estimate: CapacityEstimate, interval: Interval, *, ttft_target: float | None
) -> CapacityEstimate:
    """Take one interval of one replica into account.

    A busy, warm interval is a sample of what a replica sustains. When its TTFT missed the target the
    replica was past its limit, so the sample counts a tenth lower. A nearly idle interval teaches the
    TTFT that no further replica can beat.
    """
    if interval.age_seconds < WARM_SECONDS:
        return estimate
    if interval.busy_share < BUSY_SHARE:
        return _learn_idle(estimate, interval)
    missed = (
        ttft_target is not None
        and interval.ttft_milliseconds is not None
        and interval.ttft_milliseconds > ttft_target
    )
    sample = interval.served_per_second * (0.9 if missed else 1.0)
    return replace(estimate, samples=(*estimate.samples, sample)[-MAX_SAMPLES:])


def _learn_idle(estimate: CapacityEstimate, interval: Interval) -> CapacityEstimate:
    if interval.ttft_milliseconds is None or interval.busy_share > 0.1:
        return estimate
    best = estimate.best_idle_ttft
    seen = interval.ttft_milliseconds
    return replace(estimate, best_idle_ttft=seen if best is None else min(best, seen))


def compute_horizon(start_seconds: Sequence[float], default: float = DEFAULT_HORIZON_SECONDS) -> float:
    """p90 of measured create-to-ready times; with few of them, drawn towards a long default.

    The default counts as one observation, so the horizon shrinks with evidence and never below it.
    """
    if not start_seconds:
        return default
    ordered = sorted([*start_seconds, default] if len(start_seconds) < 5 else start_seconds)
    return ordered[min(math.ceil(len(ordered) * 0.9), len(ordered)) - 1]


def compute_warm_floor(
    rates: Sequence[float], *, interval_seconds: float, horizon_seconds: float, capacity: float | None
) -> int:
    """Replicas for bursts that are over before a start is: no start is fast enough for them.

    A burst is a run of intervals at more than twice the rate that was sustained for a whole start time around it
    (morphological opening), and it is over. Fewer than MIN_BURSTS in the record are chance and have no floor; of the
    others' peaks a high quantile counts. An idle hour, or one of steady demand, has none.

    Args:
        rates: uncached tokens per second of equal intervals, oldest first.
        interval_seconds: of one rate.
        horizon_seconds: time to start a replica.
        capacity: uncached tokens per second of one replica; None while unmeasured, which gives no floor.
    """
    width = max(2, math.ceil(horizon_seconds / interval_seconds))
    if capacity is None or capacity <= 0 or len(rates) < width:
        return 0
    sustained = _open(rates, width)
    above = [rate > BURST_RATIO * level for rate, level in zip(rates, sustained, strict=True)]
    peaks = sorted(_list_peaks(rates, above))
    if len(peaks) < MIN_BURSTS:
        return 0
    return math.ceil(peaks[min(int(len(peaks) * BURST_QUANTILE), len(peaks) - 1)] / capacity - 1e-9)


def _open(rates: Sequence[float], width: int) -> list[float]:
    """Highest level that a window of `width` around each interval never fell below."""
    lows = [min(rates[i : i + width]) for i in range(len(rates) - width + 1)]
    return [max(lows[max(0, i - width + 1) : i + 1]) for i in range(len(rates))]


def _list_peaks(rates: Sequence[float], above: Sequence[bool]) -> list[float]:
    """Highest rate of each run that has ended."""
    peaks: list[float] = []
    inside = False
    for rate, is_above in zip(rates, above, strict=True):
        if is_above:
            peaks = [*peaks[:-1], max(peaks[-1], rate)] if inside else [*peaks, rate]
        inside = is_above
    return peaks[:-1] if inside else peaks
