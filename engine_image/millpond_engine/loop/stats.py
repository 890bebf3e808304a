"""Counters and histograms the engine thread writes and the metrics endpoint reads; plain numbers, no locks.

One thread writes. A reader copies a cell's list or a family's dictionary in one bytecode that holds the
interpreter's lock, so it sees each cell whole; families may be a step apart from one another.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import product

from millpond_common.contract.metrics import Family

Labels = tuple[str, ...]


class CounterCells:
    """One counter family: a number per label values."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.values: dict[Labels, float] = {}

    def start(self, *label_values: Iterable[str]) -> None:
        """Make every combination exist at 0."""
        for labels in product(*label_values):
            self.values.setdefault(labels, 0.0)

    def add(self, amount: float, *labels: str) -> None:
        """Count up."""
        self.values[labels] = self.values.get(labels, 0.0) + amount


class HistogramCells:
    """One histogram family: bucket counts and a sum per label values."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.values: dict[Labels, list[float]] = {}
        """Counts per bucket (not cumulative), then the count beyond the last bound, then the sum."""

    def start(self, *label_values: Iterable[str]) -> None:
        """Make every combination exist at 0."""
        for labels in product(*label_values):
            self.values.setdefault(labels, [0.0] * (len(self.family.buckets) + 2))

    def observe(self, value: float, *labels: str, times: int = 1) -> None:
        """Count `value`, `times` times."""
        cell = self.values.get(labels)
        if cell is None:
            cell = self.values[labels] = [0.0] * (len(self.family.buckets) + 2)
        cell[bisect_left(self.family.buckets, value)] += times
        cell[-1] += value * times


class StatCells:
    """Cells of many families, by short name."""

    def __init__(self, families: dict[str, Family]) -> None:
        self.counters = {n: CounterCells(f) for n, f in families.items() if f.kind == "counter"}
        self.histograms = {n: HistogramCells(f) for n, f in families.items() if f.kind == "histogram"}
        self.gauges = {n: f for n, f in families.items() if f.kind == "gauge"}

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Count up a counter."""
        self.counters[name].add(amount, *labels)

    def observe(self, name: str, value: float, *labels: str, times: int = 1) -> None:
        """Observe a value in a histogram."""
        self.histograms[name].observe(value, *labels, times=times)
