"""Who is due when, so that a tick costs as much as is due, not as much as there is."""

from __future__ import annotations

import heapq


class DueTimes:
    """One time for each name; the latest one set counts."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def set(self, name: str, at: float) -> None:
        """Have it due at that time, not at the one set before."""
        if self._times.get(name) != at:
            self._times[name] = at
            heapq.heappush(self._heap, (at, name))

    def forget(self, name: str) -> None:
        """Never due again."""
        self._times.pop(name, None)

    def pop(self, now: float) -> list[str]:
        """Names that are due, each once; they are due again when they are set again."""
        due: list[str] = []
        while self._heap and self._heap[0][0] <= now:
            at, name = heapq.heappop(self._heap)
            if self._times.get(name) == at:
                del self._times[name]
                due.append(name)
        return due
