"""What a scaling decision shows: conditions, numbers of the status, and when they are worth a write."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime

from millpond_common.contract.reasons import ConditionReason, ConditionType, ScalingReason
from millpond_operator.api.status import Judgement, ScalingStatus, StartTime
from millpond_operator.plan.autoscale import Judged
from millpond_operator.plan.scale import ReplicaDecision
from millpond_operator.scaling.records import Decision
from millpond_operator.scaling.starts import summarise_starts

REFRESH_SECONDS = 60.0
"""Numbers of an unchanged decision are written again after this long."""
_GAPS = {
    ScalingReason.NO_DATA: ConditionReason.NO_DATA,
    ScalingReason.STALE_DATA: ConditionReason.STALE_DATA,
    ScalingReason.PARTIAL_DATA: ConditionReason.PARTIAL_DATA,
    ScalingReason.CAPACITY_UNKNOWN: ConditionReason.CAPACITY_UNKNOWN,
}
_LIMITS = {
    ScalingReason.TARGET_UNREACHABLE: ConditionReason.TARGET_UNREACHABLE,
    ScalingReason.MAX_REPLICAS: ConditionReason.MAX_REPLICAS,
    ScalingReason.MIN_REPLICAS: ConditionReason.MIN_REPLICAS,
    ScalingReason.RATE_LIMIT: ConditionReason.RATE_LIMIT,
}
"""The most telling first."""


@dataclass(frozen=True, slots=True)
class Published:
    """The decision as the status shows it."""

    decision: ReplicaDecision
    at: float


def publish(judged: Judged, before: Published | None, now: float) -> Published:
    """The decision to show: the one shown last while nothing but numbers moved, which are refreshed each minute."""
    decision = make_decision(judged, now)
    if before is not None and now - before.at < REFRESH_SECONDS and _is_same(decision, before.decision):
        kept = before.decision
        # Victims are chosen by what is cached now.
        return Published(
            ReplicaDecision(
                kept.replicas, kept.judgements, kept.status, kept.message, dict(judged.cached_values)
            ),
            before.at,
        )
    return Published(decision, now)


def make_decision(judged: Judged, now: float) -> ReplicaDecision:
    """The decision in the form the plan takes."""
    made = judged.decision
    return ReplicaDecision(
        replicas=made.replicas,
        judgements=(_judge_active(judged), _judge_limited(judged)),
        status=make_scaling_status(judged, now),
        message=made.message,
        cached_values=dict(judged.cached_values),
    )


def make_scaling_status(judged: Judged, now: float) -> ScalingStatus:
    """Numbers of the status; what is unknown stays away."""
    made = judged.decision
    return ScalingStatus(
        recommendation=made.recommendation,
        decision=made.replicas,
        reason=str(find_binding(made)),
        demand_tokens_per_second=_round(made.demand_per_second),
        capacity_tokens_per_second=_round(made.capacity_per_second),
        start_seconds=math.ceil(judged.start_seconds) if judged.start_seconds is not None else None,
        start_times=tuple(
            StartTime(node_kind=s.node_kind, seconds=math.ceil(s.seconds), num_starts=s.num_starts)
            for s in summarise_starts(judged.memory.starts)
        ),
        observed_at=datetime.fromtimestamp(int(now), UTC),
    )


def find_binding(made: Decision) -> ScalingReason:
    """The rule that bound the count last, or the axis that decided; an unreachable target only where nothing else did."""
    bounds = [reason for reason in made.bounds if reason is not ScalingReason.TARGET_UNREACHABLE]
    if bounds:
        return bounds[-1]
    return (
        ScalingReason.TARGET_UNREACHABLE
        if made.bounds and made.reason is ScalingReason.STEADY
        else made.reason
    )


def _round(value: float | None) -> int | None:
    return round(value) if value is not None else None


def _judge_active(judged: Judged) -> Judgement:
    kind = ConditionType.SCALING_ACTIVE
    if judged.gap is None:
        return Judgement(kind, True, ConditionReason.SCALING, judged.decision.message)
    text = f"{judged.gap_message}; the count is {judged.decision.replicas} and will not fall meanwhile"
    return Judgement(kind, False, _GAPS[judged.gap], text)


def _judge_limited(judged: Judged) -> Judgement:
    kind, made, limits = ConditionType.SCALING_LIMITED, judged.decision, judged.snapshot.limits
    bound = next((reason for reason in _LIMITS if reason in made.bounds), None)
    if bound is None:
        return Judgement(kind, False, ConditionReason.WITHIN_LIMITS, "no limit binds the count")
    best = judged.snapshot.capacity.reachable_ttft_milliseconds
    texts = {
        ScalingReason.MAX_REPLICAS: f"{made.recommendation} replicas recommended, scaling.maxReplicas is {limits.max_replicas}",
        ScalingReason.MIN_REPLICAS: f"{made.recommendation} replicas recommended, scaling.minReplicas is {limits.min_replicas}",
        ScalingReason.RATE_LIMIT: f"{made.recommendation} replicas recommended, {made.replicas} in this step",
        ScalingReason.TARGET_UNREACHABLE: (
            f"scaling.targets.ttftMilliseconds is {limits.ttft_milliseconds}, and an idle replica needs"
            f" {best or 0:.0f}: no count of replicas reaches it"
        ),
    }
    return Judgement(kind, True, _LIMITS[bound], texts[bound])


def _is_same(one: ReplicaDecision, other: ReplicaDecision) -> bool:
    """Whether two decisions say the same, numbers apart."""
    assert one.status is not None
    assert other.status is not None
    return (
        one.replicas == other.replicas
        and one.status.recommendation == other.status.recommendation
        and one.status.reason == other.status.reason
        and one.status.start_seconds == other.status.start_seconds
        and [(j.status, j.reason) for j in one.judgements] == [(j.status, j.reason) for j in other.judgements]
    )
