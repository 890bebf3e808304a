"""Whether to send a slow cold request to a second replica as well; the loser is cancelled.

Only a request that provably has not started, has no warm replica, and is past the p99 of its predicted time is
hedged; never while the pool is saturated; at most 2 % of requests (Dean, Barroso 2013).
"""

from __future__ import annotations

from array import array
from enum import StrEnum
from typing import Final

from millpond_gateway.flow.records import HedgeView

_MIN_PREDICTION_SECONDS: Final = 0.05
"""Below it a prediction says no more than that the first token comes at once."""
_RENEW_AFTER: Final = 32


class HedgeReason(StrEnum):
    """Why a request is hedged or not."""

    HEDGE = "Hedge"
    NOT_LATE = "NotLate"
    STARTED = "Started"
    WARM = "Warm"
    SATURATED = "Saturated"
    NO_BUDGET = "NoBudget"
    NO_OTHER_REPLICA = "NoOtherReplica"


class LatenessBook:
    """How much later first tokens come than predicted: the 99th percentile of recent ratios."""

    def __init__(self, *, size: int = 512, min_samples: int = 100) -> None:
        self._ratios = array("d")  # not objects of their own, which would keep a burst's memory
        self._size = size
        self._next = 0
        self._min_samples = min_samples
        self._p99: float | None = None
        self._num_since = 0

    def note(self, *, predicted_seconds: float, seconds: float) -> None:
        """Take one measured time to first token."""
        ratio = seconds / max(predicted_seconds, _MIN_PREDICTION_SECONDS)
        if len(self._ratios) < self._size:
            self._ratios.append(ratio)
        else:
            self._ratios[self._next] = ratio
            self._next = (self._next + 1) % self._size
        self._num_since += 1
        if len(self._ratios) >= self._min_samples and (self._p99 is None or self._num_since >= _RENEW_AFTER):
            ordered = sorted(self._ratios)
            self._p99 = ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)]
            self._num_since = 0

    def predict_p99(self, predicted_seconds: float) -> float | None:
        """Seconds that 99 of 100 such requests stay below; None before enough was measured."""
        if self._p99 is None:
            return None
        return self._p99 * max(predicted_seconds, _MIN_PREDICTION_SECONDS)


class HedgeBudget:
    """A share of recent requests that may be hedged."""

    def __init__(self, *, percent: float = 2.0, burst: float = 3.0) -> None:
        self._share = percent / 100.0
        self._burst = burst
        self._credit = 0.0

    def note_request(self) -> None:
        """Earn credit for one request."""
        self._credit = min(self._credit + self._share, self._burst)

    @property
    def available(self) -> bool:
        """Whether one more hedge is within the budget; a millionth covers rounding."""
        return self._credit >= 1.0 - 1e-6

    def spend(self) -> None:
        """Pay for one hedge."""
        self._credit -= 1.0


def decide_hedge(view: HedgeView, budget: HedgeBudget) -> HedgeReason:
    """Verdict on one waiting request; the caller spends the budget when it acts on `HEDGE`."""
    if view.waited_seconds <= view.predicted_p99_seconds:
        return HedgeReason.NOT_LATE
    if not view.provably_not_started:
        return HedgeReason.STARTED
    if view.cached_tokens * 2 >= view.prompt_tokens:
        return HedgeReason.WARM
    if view.pool_saturated:
        return HedgeReason.SATURATED
    if view.num_other_candidates == 0:
        return HedgeReason.NO_OTHER_REPLICA
    return HedgeReason.HEDGE if budget.available else HedgeReason.NO_BUDGET
