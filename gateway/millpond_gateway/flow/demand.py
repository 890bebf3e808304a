"""Demand of one pool as the autoscaler reads it: token rates over windows and time to first token per class."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from millpond_gateway.flow.records import DemandView

_WINDOW: Final = 60
_SHORT_WINDOW: Final = 15
_MAX_CLASSES: Final = 32
_BUCKET_RATIO: Final = 1.1
"""Time buckets grow by a tenth: a percentile is at most that much too high."""
_BUCKET_FLOOR: Final = 0.001
_NUM_BUCKETS: Final = 150


class _Ring:
    """Sums per second over the last minute, the current second apart.

    Kept in an array: numbers that are objects of their own, made during a burst, would keep its memory.
    """

    __slots__ = ("_second", "_sums")

    def __init__(self, second: int) -> None:
        self._sums = array("q", [0]) * (_WINDOW + 1)
        self._second = second

    def add(self, second: int, amount: int) -> None:
        self.advance(second)
        self._sums[self._second % len(self._sums)] += amount

    def advance(self, second: int) -> None:
        if second - self._second > _WINDOW:
            self._sums = array("q", [0]) * (_WINDOW + 1)
            self._second = second
        while self._second < second:
            self._second += 1
            self._sums[self._second % len(self._sums)] = 0

    def rate(self, window: int) -> float:
        total = sum(self._sums[(self._second - back) % len(self._sums)] for back in range(1, window + 1))
        return total / window


class _Times:
    """Histograms of two half minutes: the last full one and the current one together span up to a minute."""

    __slots__ = ("_current", "_half", "_last")

    def __init__(self, half: int) -> None:
        self._half = half
        self._current = array("q", [0]) * _NUM_BUCKETS
        self._last = array("q", [0]) * _NUM_BUCKETS

    def advance(self, half: int) -> None:
        if half <= self._half:
            return
        self._last = self._current if half == self._half + 1 else array("q", [0]) * _NUM_BUCKETS
        self._current = array("q", [0]) * _NUM_BUCKETS
        self._half = half

    def add(self, seconds: float) -> None:
        bucket = 0
        bound = _BUCKET_FLOOR
        while seconds > bound and bucket < _NUM_BUCKETS - 1:
            bound *= _BUCKET_RATIO
            bucket += 1
        self._current[bucket] += 1

    def counts(self) -> list[int]:
        return [last + current for last, current in zip(self._last, self._current, strict=True)]


def compute_percentile(counts: Sequence[int], share: float) -> float | None:
    """Seconds that `share` of the counted times stay below; None without any."""
    remaining = sum(counts) * share
    if remaining == 0:
        return None
    for bucket, count in enumerate(counts):
        remaining -= count
        if remaining <= 0:
            return _BUCKET_FLOOR * _BUCKET_RATIO**bucket
    raise AssertionError("the counts sum up to more than their own share")


class DemandBook:
    """Counts arrivals, first tokens and output of one pool."""

    def __init__(self, now: float) -> None:
        self._started_at = now
        self._uncached = _Ring(int(now))
        self._output = _Ring(int(now))
        self._times: dict[str, _Times] = {}
        self._last_request_at: float | None = None

    def arrive(self, uncached_tokens: int, now: float) -> None:
        """Count a request once, whether it is admitted, held or shed; its retries do not count again."""
        self._last_request_at = now
        self._uncached.add(int(now), uncached_tokens)

    def first_token(self, traffic_class: str, seconds: float, now: float) -> None:
        """Note a request's time to first token, held time included."""
        times = self._times.get(traffic_class)
        if times is None:
            if len(self._times) >= _MAX_CLASSES:
                return
            times = self._times[traffic_class] = _Times(_half(now))
        times.advance(_half(now))
        times.add(seconds)

    def output(self, num_tokens: int, now: float) -> None:
        """Count output tokens as they pass."""
        self._output.add(int(now), num_tokens)

    def view(self, now: float) -> DemandView:
        """Rates at `now`."""
        self._uncached.advance(int(now))
        self._output.advance(int(now))
        age = int(now) - int(self._started_at)
        return DemandView(
            uncached_tokens_per_second_15=self._uncached.rate(_SHORT_WINDOW)
            if age >= _SHORT_WINDOW
            else None,
            uncached_tokens_per_second_60=self._uncached.rate(_WINDOW) if age >= _WINDOW else None,
            output_tokens_per_second_60=self._output.rate(_WINDOW) if age >= _WINDOW else None,
            ttft_p90_milliseconds=self._percentiles(now),
            last_request_seconds_ago=None if self._last_request_at is None else now - self._last_request_at,
        )

    def count_first_tokens(self, now: float) -> dict[str, list[int]]:
        """Histogram of times to first token over the last minute, by class; sums of several give percentiles."""
        for times in self._times.values():
            times.advance(_half(now))
        return {name: times.counts() for name, times in self._times.items()}

    def _percentiles(self, now: float) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, counts in self.count_first_tokens(now).items():
            seconds = compute_percentile(counts, 0.9)
            if seconds is not None:
                found[name] = round(seconds * 1000)
        return found


def _half(now: float) -> int:
    return int(now) // 30
