"""The house form of published numbers: name, value, unit, and, where there is one, the peer's value, ratio and goal."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Figure:
    """One published number."""

    name: str
    value: float
    unit: str
    peer: float | str | None = None
    """What the peer reached in the same run, or its name."""
    ratio: float | None = None
    goal: str | None = None
    met: bool | None = None
    """None where there is no goal."""

    def __str__(self) -> str:
        peer = f", peer {_format(self.peer)}" if self.peer is not None else ""
        ratio = f", ratio {self.ratio:.2f}" if self.ratio is not None else ""
        goal = f", goal {self.goal}: {'met' if self.met else 'not met'}" if self.goal is not None else ""
        return f"{self.name:36} {_format(self.value)} {self.unit}{peer}{ratio}{goal}"


def write_figures(path: Path, figures: Iterable[Figure]) -> None:
    """Write them as one JSON list."""
    path.write_text(json.dumps([asdict(figure) for figure in figures], indent=2) + "\n", encoding="utf-8")


def _format(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
