"""Telling now and then what may happen without end, so that whoever causes it cannot write the log."""

import time
from collections.abc import Callable


class Pace:
    """Counts occurrences and says at most once in `seconds` that they may be told."""

    __slots__ = ("_clock", "_seconds", "_told_at", "_untold")

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._told_at = float("-inf")
        self._untold = 0

    def count(self) -> int:
        """Count one more; the number to tell now, those kept back included, or 0 for not now."""
        self._untold += 1
        now = self._clock()
        if now - self._told_at < self._seconds:
            return 0
        self._told_at = now
        untold, self._untold = self._untold, 0
        return untold
