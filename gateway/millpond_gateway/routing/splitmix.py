"""A seeded generator of its own, so that every choice can be replayed (SplitMix64; Steele, Lea, Flood 2014)."""

from __future__ import annotations

from typing import Final

_MASK: Final = (1 << 64) - 1


def mix64(value: int) -> int:
    """Scramble a 64-bit number: equal inputs give equal outputs, close inputs give unrelated ones."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


class SplitMix:
    """Stream of 64-bit numbers from one seed."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def next(self) -> int:
        """Next number in [0, 2**64)."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        return mix64(self._state)

    def below(self, bound: int) -> int:
        """Uniform number in [0, bound); the bias of 2**-64 * bound is far below any test's reach."""
        return (self.next() * bound) >> 64

    def uniform(self) -> float:
        """Uniform number in [0, 1)."""
        return (self.next() >> 11) * 2.0**-53
