"""How soon after one status write another follows that nobody waits for: later, the busier the API server is."""

from __future__ import annotations

from collections.abc import Callable

Clock = Callable[[], float]
HOLD_SECONDS = 1.0
HOLD_FACTOR = 10.0
"""Of the time that the last write took: of a busy API server the operator asks for a tenth of its time at most."""
MAX_HOLD_SECONDS = 10.0
MAX_KNOWN = 4096


class StatusPace:
    """Remembers for each pool until when news that is not urgent waits; what is forgotten costs one write more."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}

    def get_wait(self, uid: str) -> float:
        """Seconds for which a status that is not urgent waits; 0 when it is due."""
        return max(0.0, self._until.get(uid, 0.0) - self._clock())

    def note(self, uid: str, *, seconds: float) -> None:
        """Remember a write that has just ended, and how long it took."""
        now = self._clock()
        if len(self._until) >= MAX_KNOWN:
            self._until = {known: until for known, until in self._until.items() if until > now}
        self._until[uid] = now + min(MAX_HOLD_SECONDS, max(HOLD_SECONDS, HOLD_FACTOR * seconds))
