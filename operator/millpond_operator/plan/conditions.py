"""The conditions beside Ready: Progressing, ModelAvailable, scaling, Degraded."""

from __future__ import annotations

from millpond_common.contract import labels
from millpond_common.contract.reasons import ConditionReason, ConditionType
from millpond_operator.api.status import Judgement
from millpond_operator.plan.facts import Facts
from millpond_operator.plan.snapshot import PoolSnapshot

MODEL_REASONS = (
    ConditionReason.MODEL_FETCH_FAILED,
    ConditionReason.MODEL_LOAD,
    ConditionReason.MODEL_TOO_LARGE,
)


def judge_all(facts: Facts, ready: Judgement) -> list[Judgement]:
    """All conditions, Ready included, under one rule checked at the end: an unready pool has no claim to be complete."""
    if facts.pool.is_paused:
        ready = _pause(ready)
    judged = [ready, judge_progressing(facts, ready), judge_model(facts), judge_degraded(facts)]
    if facts.fit is not None:
        judged.append(facts.fit.judgement)
    if facts.decisions:
        judged += facts.decisions[0].judgements
    return judged


def _pause(ready: Judgement) -> Judgement:
    """Ready keeps its truth while paused and says that nothing will be mended."""
    if ready.status:
        return ready
    text = f"paused by the annotation {labels.PAUSED}, nothing is written; {ready.reason}: {ready.message}"
    return Judgement(ConditionType.READY, False, ConditionReason.PAUSED, text)


def judge_progressing(facts: Facts, ready: Judgement) -> Judgement:
    """Whether something is under way, and what it waits for."""
    kind = ConditionType.PROGRESSING
    if facts.pool.is_paused:
        return Judgement(
            kind, False, ConditionReason.PAUSED, f"remove the annotation {labels.PAUSED} to go on"
        )
    if facts.pool.is_deleting:
        return Judgement(kind, True, ConditionReason.DRAINING, ready.message)
    for role in facts.roles:
        if role.counts.rolling:
            return Judgement(kind, True, role.counts.reason, role.counts.message)
    if ready.status:
        return Judgement(kind, False, ConditionReason.COMPLETE, "nothing is under way")
    stuck = ready.reason in (
        ConditionReason.NOT_SUPPORTED,
        ConditionReason.CHILD_NOT_OURS,
        ConditionReason.CONFLICT,
        ConditionReason.SCALED_TO_ZERO,
        ConditionReason.INVALID_SPEC,
        ConditionReason.ROLLED_BACK,
        ConditionReason.MODEL_TOO_LARGE,
    )
    return Judgement(kind, not stuck, ready.reason, ready.message)


def judge_model(facts: Facts) -> Judgement:
    """Whether a replica of the current revision holds the model."""
    kind = ConditionType.MODEL_AVAILABLE
    broken = next((problem for problem in facts.problems if problem.reason in MODEL_REASONS), None)
    loaded = [pod for pod in facts.current_pods if pod.ready]
    if loaded:
        return Judgement(
            kind, True, ConditionReason.MODEL_LOADED, f"loaded in {len(loaded)} of {facts.desired} replicas"
        )
    if broken is not None:
        return Judgement(kind, False, broken.reason, broken.message)
    for pod in facts.current_pods:
        running = next((container for container in pod.containers if container.running), None)
        if running is not None and running.is_init:
            progress = facts.snapshot.fetch_progress.get(pod.uid)
            text = f"pod {pod.name} fetches {facts.pool.spec.model.source}" + (
                f": {progress}" if progress else ""
            )
            return Judgement(kind, False, ConditionReason.MODEL_FETCHING, text)
        if running is not None:
            return Judgement(kind, False, ConditionReason.MODEL_LOAD, f"pod {pod.name} loads the model")
    if facts.desired == 0:
        return Judgement(kind, None, ConditionReason.SCALED_TO_ZERO, "no replica runs that could hold it")
    return Judgement(kind, None, ConditionReason.PENDING, "no replica has started yet")


def judge_degraded(facts: Facts) -> Judgement:
    """What is wrong or missing although something may serve."""
    kind = ConditionType.DEGRADED
    if facts.foreign:
        return Judgement(kind, True, ConditionReason.CHILD_NOT_OURS, "; ".join(facts.foreign))
    problems = facts.problems
    if problems:
        return Judgement(kind, True, problems[0].reason, problems[0].message)
    keys = _describe_keys(facts.snapshot)
    if keys:
        text = f"callers with these keys are refused: {keys}"
        return Judgement(kind, True, ConditionReason.SECRET_NOT_FOUND, text)
    rivals = describe_rivals(facts)
    if rivals:
        return Judgement(kind, True, ConditionReason.CONFLICT, rivals)
    ignored = list_ignored(facts)
    if ignored:
        text = f"not served by this release and ignored: {', '.join(ignored)}"
        return Judgement(kind, True, ConditionReason.NOT_SUPPORTED, text)
    return Judgement(
        kind, False, ConditionReason.HEALTHY, "every replica that should run does, or is starting"
    )


def describe_rivals(facts: Facts) -> str:
    """Scalers that want a count somebody else owns; empty where there is at most one owner."""
    scalers, spec = facts.snapshot.scalers, facts.pool.spec
    names = ", ".join(scalers)
    if scalers and spec.scaling is not None:
        return (
            f"HorizontalPodAutoscaler {names} targets the pool, whose count spec.scaling owns, and can write nothing:"
            " delete it, or write replicas instead of scaling"
        )
    if len(scalers) > 1:
        return f"HorizontalPodAutoscalers {names} all target the pool and undo one another: keep one"
    return ""


def list_ignored(facts: Facts) -> list[str]:
    """Fields the schema accepts and this release does not act on."""
    spec = facts.pool.spec
    ignored = []
    if spec.engine.kv_cache.disk is not None:
        ignored.append("spec.engine.kvCache.disk")
    if spec.engine.kv_cache.store is not None:
        ignored.append("spec.engine.kvCache.store")
    if spec.rollout.gate is not None and not spec.gateway.enabled:
        ignored.append("spec.rollout.gate, which gateways measure")
    return ignored


def _describe_keys(snapshot: PoolSnapshot) -> str:
    """Which Secrets of tenants' API keys cannot be read, and what to do; empty where all can."""
    namespace = snapshot.pool.metadata.namespace
    missing = [
        f"Secret {name} does not exist in namespace {namespace}; create it" for name in snapshot.missing_keys
    ]
    forbidden = [
        f"Secret {name} may not be read; name it in the chart's rbac.secretNames"
        for name in snapshot.forbidden_keys
    ]
    return "; ".join([*missing, *forbidden])
