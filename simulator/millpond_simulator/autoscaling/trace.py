"""Arrivals in the public Azure form (TIMESTAMP, ContextTokens, GeneratedTokens): a reader and a generator."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace; `at` counts seconds from its start."""

    at: float
    context_tokens: int
    generated_tokens: int


def parse_azure_trace(lines: Iterable[str]) -> list[Arrival]:
    """Read the public CSV form; arrivals are returned in order of time."""
    rows = [
        (
            datetime.fromisoformat(row["TIMESTAMP"][:26].strip()),
            int(row["ContextTokens"]),
            int(row["GeneratedTokens"]),
        )
        for row in csv.DictReader(lines)
    ]
    rows.sort()
    return [
        Arrival((when - rows[0][0]).total_seconds(), context, generated) for when, context, generated in rows
    ]


@dataclass(frozen=True, slots=True)
class TraceShape:
    """A day of traffic in a few numbers."""

    hours: float = 24.0
    mean_per_second: float = 4.0
    diurnal_swing: float = 0.6
    """Amplitude of the daily wave, 0..1."""
    noise: float = 0.25
    """Standard deviation of the logarithm of the rate, correlated over about ten minutes."""
    bursts_per_hour: float = 0.5
    burst_factor: float = 2.5
    burst_seconds: float = 240.0
    context_mean: float = 1100.0
    generated_mean: float = 210.0


def generate_trace(shape: TraceShape, seed: int) -> list[Arrival]:
    """Arrivals of an inhomogeneous Poisson process: daily wave, correlated noise, bursts, log-normal lengths."""
    draw = random.Random(seed)  # noqa: S311 - a reproducible trace, nothing secret
    arrivals: list[Arrival] = []
    drift, burst_left = 0.0, 0.0
    keep = math.exp(-1 / 600)
    for second in range(int(shape.hours * 3600)):
        drift = drift * keep + draw.gauss(0, shape.noise * math.sqrt(1 - keep * keep))
        burst_left = max(burst_left - 1, 0.0)
        if burst_left == 0 and draw.random() < shape.bursts_per_hour / 3600:
            burst_left = shape.burst_seconds
        wave = 1 - shape.diurnal_swing * math.cos(2 * math.pi * second / 86_400)
        rate = shape.mean_per_second * wave * math.exp(drift) * (shape.burst_factor if burst_left else 1.0)
        for _ in range(_draw_poisson(draw, rate)):
            context = min(int(draw.lognormvariate(math.log(shape.context_mean) - 0.5, 1.0)) + 1, 16_000)
            generated = min(int(draw.lognormvariate(math.log(shape.generated_mean) - 0.32, 0.8)) + 1, 2_000)
            arrivals.append(Arrival(second + draw.random(), context, generated))
    arrivals.sort(key=lambda arrival: arrival.at)
    return arrivals


def _draw_poisson(draw: random.Random, rate: float) -> int:
    """Knuth's product method; rates here stay below a few dozen per second."""
    limit, count, product = math.exp(-rate), 0, draw.random()
    while product > limit:
        count += 1
        product *= draw.random()
    return count
