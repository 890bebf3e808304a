"""Second attempts of one pool: how late is late, and whether the budget allows one."""

from __future__ import annotations

from millpond_gateway.flow.hedge import HedgeBudget, HedgeReason, LatenessBook, decide_hedge
from millpond_gateway.flow.records import HedgeView
from millpond_gateway.proxy.dispatch import Target


class HedgeDesk:
    """Measures first tokens and judges waiting attempts."""

    def __init__(self, percent: float) -> None:
        self.lateness = LatenessBook()
        self.budget = HedgeBudget(percent=percent)
        self._enabled = percent > 0

    def note_first_token(self, target: Target, now: float) -> None:
        """A streamed answer began."""
        self.lateness.note(predicted_seconds=target.predicted_seconds, seconds=now - target.reserved_at)

    def is_late(self, target: Target, now: float) -> bool:
        """Whether everything known without asking speaks for a second attempt."""
        view = self._make_view(target, now, saturated=False, num_other_candidates=1)
        return view is not None and decide_hedge(view, self.budget) is HedgeReason.HEDGE

    def decide(self, target: Target, now: float, *, saturated: bool, num_other_candidates: int) -> bool:
        """Verdict on an attempt whose engine says that it has not begun; a yes is paid for."""
        view = self._make_view(target, now, saturated=saturated, num_other_candidates=num_other_candidates)
        if view is None or decide_hedge(view, self.budget) is not HedgeReason.HEDGE:
            return False
        self.budget.spend()
        return True

    def _make_view(
        self, target: Target, now: float, *, saturated: bool, num_other_candidates: int
    ) -> HedgeView | None:
        p99 = self.lateness.predict_p99(target.predicted_seconds) if self._enabled else None
        if p99 is None:
            return None
        return HedgeView(
            waited_seconds=now - target.reserved_at,
            predicted_p99_seconds=p99,
            provably_not_started=True,
            cached_tokens=target.cached_tokens,
            prompt_tokens=target.prompt_tokens,
            pool_saturated=saturated,
            num_other_candidates=num_other_candidates,
        )
