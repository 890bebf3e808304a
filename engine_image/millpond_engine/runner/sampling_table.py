"""Sampling parameters of all rows as arrays, so that a step gathers them by row index."""

from __future__ import annotations

from typing import Any

import numpy as np

from millpond_engine.records.request import SamplingParams
from millpond_engine.records.step import NewRow

_FIRST_ROWS = 64
_FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
Array = np.ndarray[Any, np.dtype[Any]]


class SamplingTable:
    """One line per row; `simple` tells which rows are plain greedy with nothing to report."""

    def __init__(self) -> None:
        self._allocate(_FIRST_ROWS)

    def add(self, new: NewRow) -> None:
        """Store a row's parameters."""
        if new.row >= len(self.seeds):
            self._grow(new.row + 1)
        for index, name in enumerate(_FLOATS):
            self.floats[index, new.row] = getattr(new.sampling, name)
        self.top_k[new.row] = new.sampling.top_k
        self.seeds[new.row] = new.seed & 0xFFFF_FFFF_FFFF_FFFF
        self.edited[new.row] = edits_logits(new.sampling) or new.min_tokens > 0 or new.constrained
        self.simple[new.row] = (
            new.sampling.temperature == 0 and not self.edited[new.row] and new.sampling.num_logprobs is None
        )

    def column(self, name: str, rows: Array) -> Array:
        """One parameter of the given rows, float32."""
        values: Array = self.floats[_FLOATS.index(name), rows]
        return values

    def _allocate(self, num_rows: int) -> None:
        self.floats = np.zeros((len(_FLOATS), num_rows), np.float32)
        self.top_k = np.zeros(num_rows, np.int64)
        self.seeds = np.zeros(num_rows, np.uint64)
        self.edited = np.zeros(num_rows, np.bool_)
        self.simple = np.zeros(num_rows, np.bool_)

    def _grow(self, wanted: int) -> None:
        old, size = self._arrays(), len(self.seeds)
        self._allocate(max(wanted, 2 * size))
        for source, target in zip(old, self._arrays(), strict=True):
            target[..., :size] = source

    def _arrays(self) -> tuple[Array, ...]:
        return (self.floats, self.top_k, self.seeds, self.edited, self.simple)


def edits_logits(sampling: SamplingParams) -> bool:
    """Whether anything changes the logits before the choice."""
    return bool(
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
        or sampling.logit_bias
        or sampling.allowed_token_ids
        or sampling.bad_words
    )


def draw_uniforms(seeds: Array, positions: Array) -> Array:
    """One number in [0, 1) for each (seed, position), whatever else is in the batch.

    Two rounds of the splitmix64 finalizer (Steele, Lea, Flood 2014), the position between them.
    """
    with np.errstate(over="ignore"):
        mixed = _splitmix(_splitmix(seeds.astype(np.uint64)) ^ positions.astype(np.uint64))
    uniforms: Array = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return uniforms


def _splitmix(x: Array) -> Array:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = x ^ (x >> np.uint64(31))
    return mixed
