"""How long outputs get, learned from those that have ended."""

from __future__ import annotations

_WEIGHT = 0.1
_FIRST_RATIO = 0.25
"""Share of its limit that a request is expected to generate before any has finished."""
_CALM = 0.97
_MAX_CAUTION = 2.0


class OutputEstimate:
    """Expected output length: a moving mean of finished sequences, times a caution that preemptions raise."""

    def __init__(self) -> None:
        self._mean: float | None = None
        self._caution = 1.0

    def finish(self, num_output: int) -> None:
        """Learn from a finished sequence."""
        self._mean = num_output if self._mean is None else self._mean + _WEIGHT * (num_output - self._mean)
        self._caution = max(1.0, self._caution * _CALM)

    def preempt(self) -> None:
        """Too much was admitted: expect longer outputs for a while."""
        self._caution = min(self._caution * 1.1, _MAX_CAUTION)

    def compute_remaining(self, num_output: int, limit: int) -> int:
        """Tokens a sequence will probably still generate, at most `limit - num_output`.

        One that has outlived the mean is expected to go on for a quarter of it.
        """
        left = limit - num_output
        expected = limit * _FIRST_RATIO if self._mean is None else self._mean
        expected *= self._caution
        return min(left, max(int(expected - num_output), int(expected / 4) + 1))
