"""The form of a benchmark's results: one record for each number, printed as lines and written as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Figure:
    """One measured number. `ratio` is value over peer; `goal` bounds the value or, with a peer, the ratio."""

    name: str
    value: float
    unit: str
    peer: float | None = None
    ratio: float | None = None
    goal: str | None = None
    met: bool | None = None
    """None where there is no goal."""


def compare(name: str, value: float, unit: str, *, peer: float, at_least: float) -> Figure:
    """A number whose ratio to a peer's has a lower bound."""
    ratio = value / peer
    return Figure(name, value, unit, peer, ratio, f"ratio >= {at_least:g}", ratio >= at_least)


def report(figures: list[Figure], path: Path | None) -> int:
    """Print the figures, write them where asked; returns the exit status, 1 when a goal is missed."""
    for figure in figures:
        peer = "" if figure.peer is None else f"  peer {figure.peer:.4g}, ratio {figure.ratio or 0.0:.3g}"
        goal = "" if figure.goal is None else f"  goal {figure.goal}: {'met' if figure.met else 'MISSED'}"
        sys.stdout.write(f"{figure.name}: {figure.value:.4g} {figure.unit}{peer}{goal}\n")
    if path is not None:
        write_figures(path, figures)
    return 1 if any(figure.met is False for figure in figures) else 0


def tell(line: str) -> None:
    """A line about progress, kept apart from the results."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def write_figures(path: Path, figures: Iterable[Figure]) -> None:
    """Write them as one JSON list."""
    path.write_text(json.dumps([asdict(figure) for figure in figures], indent=2) + "\n", encoding="utf-8")
