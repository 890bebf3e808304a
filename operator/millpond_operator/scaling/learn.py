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


def compute_warm_floor(arrivals: Sequence[float], *, capacity: float, quantile: float = 0.95) -> int:
    """Replicas that bursts shorter than the horizon need, since no start is fast enough for them.

    `arrivals` are uncached tokens per second of equal intervals over the last hour. An idle hour has no floor.
    """
    busy = sorted(rate for rate in arrivals if rate > 0)
    if not busy or capacity <= 0:
        return 0
    burst = busy[min(int(len(busy) * quantile), len(busy) - 1)]
    return math.ceil(burst / capacity)
