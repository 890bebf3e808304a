"""What a pool reports when the API server refuses a write for good: a right is missing, a quota is full, a policy says no."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from millpond_common.contract.reasons import ConditionReason, ConditionType
from millpond_operator.api.status import Judgement, PoolStatus, update_conditions
from millpond_operator.plan.actions import EventNote


def report_refusal(
    before: PoolStatus, problem: str, *, generation: int, now: float
) -> tuple[PoolStatus | None, EventNote | None]:
    """The status with the refusal as the reason of Ready; None where it says so already.

    Other conditions stay as they were judged last; they are not what the refusal is about.
    """
    text = f"the API server refuses a write: {problem}; it is tried again by itself"
    ready = Judgement(ConditionType.READY, False, ConditionReason.API_ERROR, text)
    stamp = datetime.fromtimestamp(now, UTC)
    (condition,) = update_conditions(before.conditions, [ready], generation=generation, now=stamp)
    others = tuple(c for c in before.conditions if c.type != ConditionType.READY)
    status = msgspec.structs.replace(before, observed_generation=generation, conditions=(condition, *others))
    if status == before:
        return None, None
    known = next((c for c in before.conditions if c.type == ConditionType.READY), None)
    is_news = known is None or known.reason != ConditionReason.API_ERROR
    return status, EventNote(True, ConditionReason.API_ERROR, "Reconcile", text) if is_news else None
