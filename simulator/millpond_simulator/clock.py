"""Virtual time: callbacks in order of time, and of scheduling where times are equal."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Clock:
    """The only source of time in a simulation."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._num_scheduled = 0

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Run `action` at `time`, or now if that has passed."""
        self._num_scheduled += 1
        heapq.heappush(self._queue, (max(time, self.now), self._num_scheduled, action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Run `action` in `seconds`."""
        self.at(self.now + seconds, action)

    def run(self, until: float = float("inf")) -> None:
        """Run what is scheduled, up to and including `until`."""
        while self._queue and self._queue[0][0] <= until:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        if until != float("inf"):
            self.now = max(self.now, until)
