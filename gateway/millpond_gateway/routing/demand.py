"""Rate of work that all gateways route to a pool: uncached tokens per second, decaying."""

from __future__ import annotations

import math
from typing import Final

_TAU_SECONDS: Final = 10.0


class WorkRate:
    """Exponentially decaying mean of routed uncached tokens per second."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._updated_at: float | None = None
        self._began_at = 0.0

    def add(self, tokens: int, now: float) -> None:
        """Count routed work."""
        if self._updated_at is None:
            self._began_at = self._updated_at = now
        self._decay(now)
        self._tokens += tokens

    def per_second(self, now: float) -> float:
        """The rate; corrected for the short past just after the start."""
        if self._updated_at is None:
            return 0.0
        self._decay(now)
        observed = -math.expm1(-(now - self._began_at) / _TAU_SECONDS)
        return self._tokens / (_TAU_SECONDS * max(observed, 0.1))

    def _decay(self, now: float) -> None:
        assert self._updated_at is not None
        if now > self._updated_at:
            self._tokens *= math.exp((self._updated_at - now) / _TAU_SECONDS)
            self._updated_at = now
