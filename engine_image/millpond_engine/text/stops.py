"""Stop strings over text that comes in pieces: hold back only a tail that could still become one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopHit:
    """A stop string was completed."""

    stop: str
    before: str
    """Text to release in front of it."""


class StopMatcher:
    """Finds the earliest completed stop; among those that end together, the longest."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str, *, counts: bool = True) -> tuple[str, StopHit | None]:
        """Text to release now, and the hit that ends the sequence.

        With `counts` False a stop completed by this piece is passed over for good (fewer than
        `min_tokens` so far); one that it only begins may still be completed later.
        """
        if not self._stops:
            return text, None
        buffer = self._held + text
        if counts:
            hit = self._find(buffer, len(self._held))
            if hit is not None:
                self._held = ""
                return hit.before, hit
        keep = self._count_tail(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], None

    def flush(self) -> str:
        """The text held back, once nothing more can come."""
        held, self._held = self._held, ""
        return held

    def _find(self, buffer: str, old: int) -> StopHit | None:
        """The first stop that ends after `old` characters."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop, max(0, old - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return StopHit(best[2], buffer[: best[1]]) if best else None

    def _count_tail(self, buffer: str) -> int:
        """Length of the longest tail that is a proper prefix of a stop."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:length]):
                    longest = length
                    break
        return longest
