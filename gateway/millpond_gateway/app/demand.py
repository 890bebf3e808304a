"""Demand of one pool over the last minute: rates, first-token times, last request; pure, time is a parameter."""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 60
_MAX_TIMES = 4096
"""First-token times kept per class; past it the oldest go first."""


class RateWindow:
    """Sums per second over the last minute."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._sums: deque[tuple[int, float]] = deque()

    def add(self, amount: float, now: float) -> None:
        """Count an amount."""
        second = int(now)
        if self._sums and self._sums[-1][0] == second:
            self._sums[-1] = (second, self._sums[-1][1] + amount)
        else:
            self._sums.append((second, amount))
            self._trim(second)

    def compute_rate(self, seconds: int, now: float) -> float | None:
        """Mean per second over the last whole `seconds`; None while the window is not full."""
        if now - self._began < seconds:
            return None
        last = int(now)
        return sum(amount for second, amount in self._sums if last - seconds <= second < last) / seconds

    def _trim(self, second: int) -> None:
        while self._sums and self._sums[0][0] < second - WINDOW_SECONDS:
            self._sums.popleft()


class PoolDemand:
    """What arrived at one pool and how long it waited."""

    def __init__(self, now: float) -> None:
        self.uncached_tokens = RateWindow(now)
        self.output_tokens = RateWindow(now)
        self._times: dict[str, deque[tuple[float, float]]] = {}
        self._last_at: float | None = None

    def note_arrival(self, uncached_tokens: int, now: float) -> None:
        """A request arrived, whatever becomes of it; a retry is no arrival."""
        self._last_at = now
        self.uncached_tokens.add(uncached_tokens, now)

    def note_first_token(self, traffic_class: str, seconds: float, now: float) -> None:
        """A request of a class got its first byte this long after it arrived."""
        times = self._times.setdefault(traffic_class, deque(maxlen=_MAX_TIMES))
        times.append((now, seconds))

    def compute_last_seconds_ago(self, now: float) -> float | None:
        """Time since the last request; None before the first."""
        return None if self._last_at is None else now - self._last_at

    def compute_ttft_p90_milliseconds(self, now: float) -> dict[str, int]:
        """90th percentile of the last minute per class."""
        found: dict[str, int] = {}
        for traffic_class, times in self._times.items():
            recent = sorted(seconds for at, seconds in times if now - at <= WINDOW_SECONDS)
            if recent:
                found[traffic_class] = round(recent[min(len(recent) - 1, int(len(recent) * 0.9))] * 1000)
        return found
