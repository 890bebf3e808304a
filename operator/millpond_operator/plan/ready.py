"""Ready: a chain of checks, of which the first that fails names the reason.

True only when nothing failed: the children exist, every wanted replica is of the current revision, every gateway routes
to it, and a real request through the gateway was answered by it.
"""

from __future__ import annotations

from collections.abc import Callable

from millpond_common.contract.reasons import ConditionReason, ConditionType
from millpond_operator.api.pool import InferencePool
from millpond_operator.api.status import Judgement
from millpond_operator.desired.kinds import CLAIM, SECRET, Kind
from millpond_operator.plan.answering import find_answer, has_answered, is_routed
from millpond_operator.plan.facts import Facts
from millpond_operator.plan.snapshot import Pod

Check = Callable[[Facts], tuple[ConditionReason, str] | None]
MAX_FAILURE = 400
"""Characters of what a node says about a pod it ended."""
MAX_NAMED = 3
"""Replicas named in one message; the rest is counted."""


def judge_ready(facts: Facts) -> Judgement:
    """The summary condition."""
    for check in CHECKS:
        failure = check(facts)
        if failure is not None:
            return Judgement(ConditionType.READY, False, *failure)
    if facts.desired == 0:
        text = "no replica runs; the gateway holds requests and wakes the pool"
        return Judgement(ConditionType.READY, True, ConditionReason.SCALED_TO_ZERO, text)
    where = "through the gateway" if facts.snapshot.gateway is not None else "directly"
    text = f"{_count(facts.desired)} of the current revision answered a real request {where}"
    return Judgement(ConditionType.READY, True, ConditionReason.ANSWERING, text)


def _check_deleting(facts: Facts) -> tuple[ConditionReason, str] | None:
    if not facts.pool.is_deleting:
        return None
    left = sum(1 for _ in facts.snapshot.pods)
    return ConditionReason.DRAINING, f"the pool is being deleted; {_count(left)} still to leave"


def _check_supported(facts: Facts) -> tuple[ConditionReason, str] | None:
    found = find_unsupported(facts.pool)
    if found is None:
        return None
    field, remedy = found
    return (
        ConditionReason.NOT_SUPPORTED,
        f"{field} is not served by this release and nothing was started; {remedy}",
    )


def find_unsupported(pool: InferencePool) -> tuple[str, str] | None:
    """A field no replica of this release could start with, and what to do instead."""
    if pool.spec.disaggregation is not None:
        return "spec.disaggregation", "write replicas or scaling instead"
    if pool.spec.model.adapters:
        return "spec.model.adapters", "remove it, or publish the merged weights as a pool of their own"
    return None


def _check_foreign(facts: Facts) -> tuple[ConditionReason, str] | None:
    if not facts.foreign:
        return None
    text = "; ".join(facts.foreign)
    return (
        ConditionReason.CHILD_NOT_OURS,
        f"a name the pool needs is taken: {text}; rename or delete that object",
    )


def _check_leftovers(facts: Facts) -> tuple[ConditionReason, str] | None:
    """Somebody deleted the pool and made it again: its old objects leave by themselves within seconds."""
    if not facts.leftovers:
        return None
    named = ", ".join(facts.leftovers[:MAX_NAMED]) + _more(len(facts.leftovers))
    return ConditionReason.CREATING, f"waiting until what an earlier pool of this name left is gone: {named}"


def _check_name(facts: Facts) -> tuple[ConditionReason, str] | None:
    keeper = facts.snapshot.name_keeper
    if not keeper:
        return None
    text = f"the gateway serves the model name {facts.pool.model_name} from pool {keeper}, which is older"
    return ConditionReason.CONFLICT, f"{text}; write another spec.model.name, or delete that pool"


def _check_secrets(facts: Facts) -> tuple[ConditionReason, str] | None:
    return _tell_missing(facts, SECRET, facts.snapshot.missing_secrets, ConditionReason.SECRET_NOT_FOUND)


def _check_claims(facts: Facts) -> tuple[ConditionReason, str] | None:
    return _tell_missing(facts, CLAIM, facts.snapshot.missing_claims, ConditionReason.CLAIM_NOT_FOUND)


def _tell_missing(
    facts: Facts, kind: Kind, names: tuple[str, ...], reason: ConditionReason
) -> tuple[ConditionReason, str] | None:
    if not names:
        return None
    text = f"{kind.name} {', '.join(names)} does not exist in namespace {facts.pool.metadata.namespace}"
    return reason, f"{text}; create it, the pool goes on by itself"


def _check_fit(facts: Facts) -> tuple[ConditionReason, str] | None:
    if facts.fit is None or not facts.fit.refused:
        return None
    text = f"{facts.fit.judgement.message}; no replica of this revision is started until the spec or the nodes change"
    return ConditionReason.MODEL_TOO_LARGE, text


def _check_zero(facts: Facts) -> tuple[ConditionReason, str] | None:
    """Zero replicas are fine only where a request wakes the pool."""
    if facts.desired > 0 or facts.pool.spec.scaling is not None:
        return None
    return ConditionReason.SCALED_TO_ZERO, "spec.replicas is 0, so no replica answers; raise it to serve"


def _check_rejected(facts: Facts) -> tuple[ConditionReason, str] | None:
    """The pool serves, but not what its spec asks for."""
    for role in facts.roles:
        if role.rejection is not None:
            text = (
                f"revision {role.wanted_revision} was rolled back to {role.rejection.fallback}:"
                f" {role.rejection.message}; change the spec or the gate to try again"
            )
            return ConditionReason.ROLLED_BACK, text
    return None


def _check_problems(facts: Facts) -> tuple[ConditionReason, str] | None:
    problems = facts.problems
    if not problems:
        return None
    more = f" (and {len(problems) - 1} more replicas with problems)" if len(problems) > 1 else ""
    return problems[0].reason, problems[0].message + more


def _check_failures(facts: Facts) -> tuple[ConditionReason, str] | None:
    revisions = {role.revision for role in facts.roles}
    failing = [w for w in facts.snapshot.workloads if w.failure_message and w.revision in revisions]
    if not failing:
        return None
    return ConditionReason.REPLICAS_NOT_READY, f"pods cannot be created: {failing[0].failure_message}"


def _check_rollout(facts: Facts) -> tuple[ConditionReason, str] | None:
    for role in facts.roles:
        if role.counts.rolling:
            answering = sum(1 for pod in role.current_pods if pod.uid in role.answering)
            text = f"{len(role.current_pods)} of {_count(role.desired)} updated to revision {role.revision}"
            return role.counts.reason, f"{text}, {answering} of them answering; {role.counts.message}"
    return None


def _check_created(facts: Facts) -> tuple[ConditionReason, str] | None:
    waiting = [apply.manifest for apply in facts.pending_applies if apply.is_new]
    if waiting:
        named = ", ".join(f"{m.kind.name} {m.name}" for m in waiting[:MAX_NAMED])
        return ConditionReason.CREATING, f"being made: {named}" + _more(len(waiting))
    missing = facts.desired - len(facts.current_pods)
    if missing > 0:
        text = f"{_count(missing)} of {facts.desired} not created yet"
        return ConditionReason.CREATING, text + _tell_ended(facts)
    return None


def _check_surplus(facts: Facts) -> tuple[ConditionReason, str] | None:
    """More replicas than wanted: a scale-down that has not happened yet."""
    surplus = len(facts.current_pods) - facts.desired
    return (
        (ConditionReason.DRAINING, f"{_count(surplus)} above the wanted count to leave")
        if surplus > 0
        else None
    )


def _check_pods(facts: Facts) -> tuple[ConditionReason, str] | None:
    waiting = [pod for pod in facts.current_pods if not pod.ready]
    if not waiting:
        cordoned = [pod for pod in facts.current_pods if pod.cordoned]
        return (ConditionReason.DRAINING, f"cordoned: {_name(cordoned)}") if cordoned else None
    text = f"{_count(len(waiting))} of {facts.desired} not ready: {_name(waiting)} ({_tell_doing(facts, waiting)})"
    return ConditionReason.REPLICAS_NOT_READY, text + _tell_ended(facts)


def _tell_doing(facts: Facts, waiting: list[Pod]) -> str:
    """What the first of them does. A fetch that fails and tries again says so here, long before it gives up."""
    containers = waiting[0].containers
    if any(container.is_init and container.running for container in containers):
        told = (facts.snapshot.fetch_progress.get(pod.uid) for pod in waiting)
        progress = next((line for line in told if line), "")
        return f"fetching the model: {progress}" if progress else "fetching the model"
    loading = any(not container.is_init and container.running for container in containers)
    return "loading the model" if loading else "starting"


def _tell_ended(facts: Facts) -> str:
    """What became of the replica before, where its node ended it: the next may fare no better."""
    current = {role.revision for role in facts.roles}
    failed = [pod for pod in facts.snapshot.ended if pod.failure and pod.revision in current]
    last = max(failed, key=lambda pod: (pod.created_at, pod.name), default=None)
    return f"; its node ended {last.name}: {last.failure[:MAX_FAILURE]}" if last is not None else ""


def _check_gateway(facts: Facts) -> tuple[ConditionReason, str] | None:
    gateway = facts.snapshot.gateway
    if gateway is None or gateway.num_reporting > 0:
        return None
    if gateway.num_ready == 0:
        text = "no pod of the namespace's gateway (Deployment millpond-gateway) is ready"
        return ConditionReason.GATEWAY_NOT_READY, f"{text}: {gateway.problem}" if gateway.problem else text
    return (
        ConditionReason.GATEWAY_NOT_READY,
        f"no gateway answers the operator: {gateway.error or 'not asked yet'}",
    )


def _check_routing(facts: Facts) -> tuple[ConditionReason, str] | None:
    unrouted = [pod for pod in facts.current_pods if not is_routed(facts.snapshot, pod)]
    if not unrouted:
        return None
    return ConditionReason.GATEWAY_NOT_ROUTING, f"not every gateway routes to {_name(unrouted)} yet"


def _check_probes(facts: Facts) -> tuple[ConditionReason, str] | None:
    for pod in facts.current_pods:
        answer = find_answer(facts.snapshot, pod)
        if has_answered(facts.snapshot, pod):
            continue
        if answer is None:
            return ConditionReason.PENDING, f"{pod.name} has not answered a real request yet"
        return ConditionReason.PROBE_FAILED, f"a real request to {pod.name} failed: {answer.message}"
    return None


CHECKS: tuple[Check, ...] = (
    _check_deleting,
    _check_supported,
    _check_foreign,
    _check_leftovers,
    _check_name,
    _check_secrets,
    _check_claims,
    _check_fit,
    _check_zero,
    _check_rejected,
    _check_problems,
    _check_failures,
    _check_rollout,
    _check_created,
    _check_surplus,
    _check_pods,
    _check_gateway,
    _check_routing,
    _check_probes,
)


def _count(num: int) -> str:
    return f"{num} replica" if num == 1 else f"{num} replicas"


def _name(pods: list[Pod]) -> str:
    return ", ".join(pod.name for pod in pods[:MAX_NAMED]) + _more(len(pods))


def _more(num: int) -> str:
    return f" and {num - MAX_NAMED} more" if num > MAX_NAMED else ""
