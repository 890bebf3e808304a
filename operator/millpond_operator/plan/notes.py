"""Events: one for each transition of a condition, none for a state that stays."""

from __future__ import annotations

from collections.abc import Sequence

from millpond_common.contract.reasons import ConditionReason, ConditionType
from millpond_operator.api.status import Condition, PoolStatus
from millpond_operator.plan.actions import EventNote
from millpond_operator.plan.scale import ReplicaDecision

QUIET = {
    ConditionReason.PENDING,
    ConditionReason.HEALTHY,
    ConditionReason.WITHIN_LIMITS,
    ConditionReason.FIXED_REPLICAS,
}
WARNINGS = {
    ConditionReason.UNSCHEDULABLE,
    ConditionReason.IMAGE_PULL,
    ConditionReason.CRASH_LOOP,
    ConditionReason.OOM_KILLED,
    ConditionReason.MODEL_FETCH_FAILED,
    ConditionReason.MODEL_TOO_LARGE,
    ConditionReason.CONFIG_ERROR,
    ConditionReason.SECRET_NOT_FOUND,
    ConditionReason.CLAIM_NOT_FOUND,
    ConditionReason.CHILD_NOT_OURS,
    ConditionReason.CONFLICT,
    ConditionReason.NOT_SUPPORTED,
    ConditionReason.INVALID_SPEC,
    ConditionReason.PROBE_FAILED,
    ConditionReason.ROLLED_BACK,
}
WATCHED = (ConditionType.READY, ConditionType.PROGRESSING)
"""Conditions whose transitions are told; the others show the same causes."""


def note_scaling(before: PoolStatus, desired: int, decisions: Sequence[ReplicaDecision]) -> list[EventNote]:
    """One note when the autoscaler changes the count; the first count of a pool is no change."""
    made = next((decision for decision in decisions if decision.status is not None), None)
    if made is None or before.desired_replicas is None or before.desired_replicas == desired:
        return []
    text = f"from {before.desired_replicas} to {made.message}"
    assert made.status is not None
    return [EventNote(False, made.status.reason or ConditionReason.SCALING, "Scale", text)]


def note_transitions(before: PoolStatus, after: PoolStatus) -> list[EventNote]:
    """Notes of what changed between two statuses, each reason once."""
    old = {condition.type: condition for condition in before.conditions}
    notes: dict[str, EventNote] = {}
    for condition in after.conditions:
        if condition.type in WATCHED and _is_news(old.get(condition.type), condition):
            notes.setdefault(condition.reason, _make_note(condition))
    return list(notes.values())


def _is_news(before: Condition | None, after: Condition) -> bool:
    if after.reason in QUIET or (
        after.type == ConditionType.PROGRESSING and after.reason == ConditionReason.COMPLETE
    ):
        return False
    return before is None or before.reason != after.reason or before.status != after.status


def _make_note(condition: Condition) -> EventNote:
    bad = condition.reason in WARNINGS
    return EventNote(bad, condition.reason, "Reconcile", condition.message)
