"""The decision about one pool: what to write, what to report, what to tell, when to look again."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from millpond_common.contract.labels import FINALIZER
from millpond_common.contract.reasons import ConditionReason, ConditionType
from millpond_operator.api.pool import PoolMetadata, list_roles
from millpond_operator.api.status import Judgement, PoolStatus, update_conditions
from millpond_operator.plan.actions import STAGE_FIRST, Action, PoolPlan, SetFinalizer
from millpond_operator.plan.children import ChildrenPlan, drop_old_records, plan_children
from millpond_operator.plan.conditions import judge_all
from millpond_operator.plan.deletion import plan_deletion
from millpond_operator.plan.facts import Facts
from millpond_operator.plan.known_model import judge_fits
from millpond_operator.plan.notes import note_scaling, note_transitions
from millpond_operator.plan.ready import find_unsupported, judge_ready
from millpond_operator.plan.scale import ReplicaDecision, decide_replicas, find_current, find_owner
from millpond_operator.plan.settings import PlanSettings
from millpond_operator.plan.snapshot import PoolSnapshot
from millpond_operator.plan.status import make_status
from millpond_operator.plan.urgency import is_urgent
from millpond_operator.plan.workloads import RolePlan, plan_role

Decisions = Mapping[str, ReplicaDecision]
"""The autoscaler's decisions by role (Both, Prefill, Decode)."""

NO_CHILDREN = ChildrenPlan((), (), ())


def plan(
    snapshot: PoolSnapshot, settings: PlanSettings, now: float, decisions: Decisions | None = None
) -> PoolPlan:
    """Decide about one pool. Pure: equal inputs give equal plans."""
    pool = snapshot.pool
    if pool.is_deleting:
        return _plan_deleting(snapshot, settings, now)
    supported = find_unsupported(pool) is None
    fit = judge_fits(snapshot) if supported else None
    refused = fit.refused if fit is not None else frozenset()
    made, roles = _plan_roles(snapshot, settings, decisions or {}, refused) if supported else ((), ())
    children = plan_children(snapshot, settings) if supported else NO_CHILDREN
    facts = Facts(snapshot, roles, made, children, settings, now, fit)
    if pool.is_paused or not supported:
        return _finish(facts, ())
    return (
        _plan_first(facts)
        if FINALIZER not in pool.metadata.finalizers
        else _finish(facts, _list_actions(facts))
    )


def _plan_roles(
    snapshot: PoolSnapshot, settings: PlanSettings, decisions: Decisions, refused: frozenset[str]
) -> tuple[tuple[ReplicaDecision, ...], tuple[RolePlan, ...]]:
    made, roles = [], []
    for role in list_roles(snapshot.pool):
        current = find_current(snapshot, role.role.lower())
        decision = decide_replicas(role, current, decisions.get(role.role), find_owner(snapshot))
        made.append(decision)
        roles.append(plan_role(snapshot, role, decision, settings, refused=role.role in refused))
    return tuple(made), tuple(roles)


def _plan_first(facts: Facts) -> PoolPlan:
    """Of a new pool only what its pods wait for; the rest and the status come with the next round, which follows at once.

    API server and controllers make the pods meanwhile, and what else they are asked for stands in their way.
    """
    actions: list[Action] = [SetFinalizer(present=True)]
    actions += [action for role in facts.roles for action in role.actions]
    actions += [apply for apply in facts.children.applies if apply.stage == STAGE_FIRST]
    return PoolPlan(tuple(actions), None, (), recheck_seconds=facts.settings.moving_recheck_seconds)


def _list_actions(facts: Facts) -> tuple[Action, ...]:
    actions = [action for role in facts.roles for action in role.actions]
    actions += facts.children.applies
    actions += facts.children.deletes
    in_use = {workload.name for workload in facts.snapshot.workloads} | facts.rejected_records
    records = [role.record for role in facts.roles]
    actions += drop_old_records(facts.snapshot, records, in_use=in_use, history=facts.settings.history)
    return tuple(actions)


def _plan_deleting(snapshot: PoolSnapshot, settings: PlanSettings, now: float) -> PoolPlan:
    facts = Facts(snapshot, (), (), NO_CHILDREN, settings, now)
    return _finish(facts, plan_deletion(snapshot, settings, now))


def _finish(facts: Facts, actions: tuple[Action, ...]) -> PoolPlan:
    pool = facts.pool
    ready = judge_ready(facts)
    judgements = judge_all(facts, ready)
    status = make_status(facts, judgements)
    events = [note for role in facts.roles for note in role.events] if actions else []
    events += note_scaling(pool.status, facts.desired, facts.decisions) if actions else []
    events += note_transitions(pool.status, status)
    return PoolPlan(
        actions=actions,
        status=None if status == pool.status else status,
        events=tuple(events),
        recheck_seconds=_choose_recheck(facts, moving=_is_moving(facts, ready, actions)),
        urgent=bool(actions) or is_urgent(pool.status, status),
    )


def _is_moving(facts: Facts, ready: Judgement, actions: tuple[Action, ...]) -> bool:
    """Whether something is on its way. A pool without a replica that wants none is not Ready, and waits for nothing."""
    if actions or facts.rolling:
        return True
    resting = ready.reason == ConditionReason.SCALED_TO_ZERO and not facts.snapshot.pods
    return not ready.status and not resting


def _choose_recheck(facts: Facts, *, moving: bool) -> float:
    settings = facts.settings
    if moving:
        return settings.moving_recheck_seconds
    draining = any(pod.deleting and not pod.is_lost(facts.now) for pod in facts.snapshot.pods)
    waiting = facts.snapshot.missing_keys or facts.snapshot.forbidden_keys  # nobody tells when a Secret comes
    return settings.draining_recheck_seconds if draining or waiting else settings.settled_recheck_seconds


def plan_invalid(metadata: PoolMetadata, before: PoolStatus, problem: str, now: float) -> PoolPlan:
    """Report a spec that cannot be read, and touch nothing."""
    text = f"{problem}; correct it, the pool goes on by itself"
    judgements = [
        Judgement(ConditionType.READY, False, ConditionReason.INVALID_SPEC, text),
        Judgement(ConditionType.PROGRESSING, False, ConditionReason.INVALID_SPEC, text),
    ]
    conditions = update_conditions(
        before.conditions, judgements, generation=metadata.generation, now=datetime.fromtimestamp(now, UTC)
    )
    status = PoolStatus(observed_generation=metadata.generation, conditions=conditions)
    changed = None if status == before else status
    return PoolPlan((), changed, tuple(note_transitions(before, status)), recheck_seconds=300.0)
