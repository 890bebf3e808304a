"""Where the fake runner's seconds pass: on the wall, or in a number that a simulation advances."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic time that can be waited for."""

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        ...

    def wait_until(self, moment: float) -> None:
        """Return once `now()` has reached `moment`."""
        ...


class RealClock:
    """Monotonic time of this machine; waiting sleeps."""

    def now(self) -> float:
        """Seconds of the monotonic clock."""
        return time.monotonic()

    def wait_until(self, moment: float) -> None:
        """Sleep until `moment`."""
        left = moment - time.monotonic()
        if left > 0:
            time.sleep(left)


class VirtualClock:
    """Time that only moves when someone waits: hours of serving in seconds of test."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """The number."""
        return self._now

    def wait_until(self, moment: float) -> None:
        """Jump to `moment` unless it has passed."""
        self._now = max(self._now, moment)
