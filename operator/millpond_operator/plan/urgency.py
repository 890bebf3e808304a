"""Which news of a pool is told at once, and which may wait to be told together with what follows it.

A pool on its way to Ready passes through many states within seconds. Somebody waits for the first status, for a
condition that flips and for what goes wrong; the steps between are worth a write only if they last.
"""

from __future__ import annotations

from millpond_common.contract.reasons import ConditionType
from millpond_operator.api.status import PoolStatus
from millpond_operator.plan.notes import WARNINGS

PATIENT = (ConditionType.MODEL_AVAILABLE,)
"""Conditions whose flips wait too: Ready shows the same a moment later."""


def is_urgent(before: PoolStatus, after: PoolStatus) -> bool:
    """Whether the later status must be written at once."""
    if _summarise(before) != _summarise(after):
        return True
    known = {(condition.type, condition.status) for condition in before.conditions}
    flipped = [c for c in after.conditions if (c.type, c.status) not in known and c.type not in PATIENT]
    reasons = {condition.reason for condition in before.conditions}
    return bool(flipped) or any(c.reason in WARNINGS and c.reason not in reasons for c in after.conditions)


def _summarise(status: PoolStatus) -> tuple[object, ...]:
    """What scalers, rollouts and scripts read besides the conditions."""
    decided = status.scaling.decision if status.scaling is not None else None
    leaving = tuple(draining.replica for draining in status.draining)
    return (
        status.observed_generation,
        status.desired_replicas,
        status.selector,
        status.endpoint,
        status.revision,
        decided,
        leaving,
    )
