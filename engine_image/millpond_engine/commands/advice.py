"""The block-size advisor: fragmentation against indirection, for a distribution of sequence lengths.

A block of B tokens wastes on average about B/2 tokens at the end of every sequence (memory that holds nothing,
so fewer sequences fit) and, with a shared prefix, recomputes the part of the prefix behind its last full block.
A small block costs one more table entry, address and jump per B tokens read. The sum is a U over B; its
floor is the advice. Lengths are whole sequences: prompt plus output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

CANDIDATES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_NUM_QUANTILES = 1000


@dataclass(frozen=True, slots=True)
class Workload:
    """What the sequences look like."""

    lengths: tuple[int, ...]
    shared_prefix_tokens: int = 0
    """Tokens at the beginning that requests share."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Costs of one block size, as fractions of the useful work."""

    block_tokens: int
    fragmentation: float
    """Unused token slots over used ones."""
    recompute: float
    """Prefix tokens that sharing by whole blocks misses, over all tokens."""
    indirection: float
    """Time for block addresses over the time to read the KV."""

    @property
    def total(self) -> float:
        """The sum that the advice minimizes."""
        return self.fragmentation + self.recompute + self.indirection


class LengthsError(ValueError):
    """A distribution or a file of lengths cannot be read; the message says what is allowed."""


def compute_curve(
    workload: Workload, *, block_read_tokens: float, candidates: Sequence[int] = CANDIDATES
) -> tuple[CurvePoint, ...]:
    """The U-curve; `block_read_tokens` is the cost of one block's address in tokens of KV read."""
    used = sum(workload.lengths)
    points = []
    for size in candidates:
        blocks = sum(-(-length // size) for length in workload.lengths)
        missed = (workload.shared_prefix_tokens % size) * len(workload.lengths)
        points.append(
            CurvePoint(
                block_tokens=size,
                fragmentation=(blocks * size - used) / used,
                recompute=missed / used,
                indirection=blocks * block_read_tokens / used,
            )
        )
    return tuple(points)


def choose_block_tokens(curve: Sequence[CurvePoint]) -> CurvePoint:
    """The floor of the U; of equals the larger block, which makes fewer of everything."""
    return min(curve, key=lambda point: (point.total, -point.block_tokens))


def parse_distribution(text: str) -> tuple[int, ...]:
    """Lengths at even quantiles of `fixed:N`, `uniform:LOW,HIGH` or `lognormal:MEDIAN,SIGMA`.

    Raises:
        LengthsError: anything else.
    """
    kind, _, rest = text.partition(":")
    try:
        numbers = [float(part) for part in rest.split(",")]
    except ValueError as error:
        raise LengthsError(f"{text!r}: numbers must follow the colon") from error
    steps = [(i + 0.5) / _NUM_QUANTILES for i in range(_NUM_QUANTILES)]
    if kind == "fixed" and len(numbers) == 1:
        values = [numbers[0]]
    elif kind == "uniform" and len(numbers) == 2:
        values = [numbers[0] + step * (numbers[1] - numbers[0]) for step in steps]
    elif kind == "lognormal" and len(numbers) == 2 and numbers[0] > 0:
        normal = NormalDist()
        values = [numbers[0] * math.exp(numbers[1] * normal.inv_cdf(step)) for step in steps]
    else:
        raise LengthsError(f"{text!r}: use fixed:N, uniform:LOW,HIGH or lognormal:MEDIAN,SIGMA")
    lengths = tuple(max(1, round(value)) for value in values)
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise LengthsError(f"{text!r}: lengths must be positive")
    return lengths


def format_curve(curve: Sequence[CurvePoint], best: CurvePoint, *, width: int = 40) -> str:
    """The curve as a table with bars."""
    highest = max(point.total for point in curve) or 1.0
    lines = ["block  fragmentation  recompute  indirection    total"]
    for point in curve:
        bar = "#" * max(1, round(width * point.total / highest))
        mark = "  <- advice" if point is best else ""
        lines.append(
            f"{point.block_tokens:5d}  {point.fragmentation:12.2%}  {point.recompute:9.2%}"
            f"  {point.indirection:11.2%}  {point.total:7.2%}  {bar}{mark}"
        )
    return "\n".join(lines)
