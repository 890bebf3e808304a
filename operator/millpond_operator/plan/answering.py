"""Which replicas answer requests, and which must be asked."""

from __future__ import annotations

from millpond_common.contract.reasons import ConditionType
from millpond_operator.api.status import get_condition
from millpond_operator.plan.snapshot import Pod, PoolSnapshot, ProbeAnswer


def list_answering(snapshot: PoolSnapshot, pods: tuple[Pod, ...], *, current: str) -> frozenset[str]:
    """Uids of the replicas that answer.

    A replica of the current revision must prove it: ready, routed by every gateway, a real request answered. One of an
    older revision proved it when it was current; it counts unless a gateway says that it no longer routes to it.
    """
    return frozenset(
        p.uid for p in pods if (is_proven(snapshot, p) if p.revision == current else _is_known(snapshot, p))
    )


def is_proven(snapshot: PoolSnapshot, pod: Pod) -> bool:
    """Ready, routed, and the latest real request succeeded."""
    return pod.serving and is_routed(snapshot, pod) and has_answered(snapshot, pod)


def has_answered(snapshot: PoolSnapshot, pod: Pod) -> bool:
    """Whether the latest real request to this start of the replica succeeded, as far as known.

    Answers are not kept across a restart of the operator, but the pool's own status is: Ready became true when every
    replica had answered, so one that has been ready since before then did. It is asked again meanwhile.
    """
    answer = find_answer(snapshot, pod)
    if answer is not None:
        return answer.ok
    ready = get_condition(snapshot.pool.status, ConditionType.READY)
    if ready is None or ready.status != "True" or pod.ready_since is None:
        return False
    return pod.ready_since <= ready.last_transition_time.timestamp()


def is_routed(snapshot: PoolSnapshot, pod: Pod) -> bool:
    """Whether every gateway may choose the replica; true for a pool that wants no gateway."""
    return snapshot.gateway is None or snapshot.gateway.is_routed(pod.uid)


def find_answer(snapshot: PoolSnapshot, pod: Pod) -> ProbeAnswer | None:
    """The latest real request to this start of the replica."""
    return snapshot.probes.get(pod.uid)


def _is_known(snapshot: PoolSnapshot, pod: Pod) -> bool:
    gateway = snapshot.gateway
    if not pod.serving:
        return False
    return gateway is None or gateway.num_reporting == 0 or gateway.is_routed(pod.uid)
