"""Which replicas leave when a count falls, and how the cluster is told."""

from __future__ import annotations

from millpond_common.contract import labels
from millpond_operator.plan.actions import MarkPod
from millpond_operator.plan.snapshot import GatewayView, Pod

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
VICTIM_COST = -1000
"""Below the default of 0, so the ReplicaSet controller takes these first."""


def choose_victims(pods: list[Pod], num: int, gateway: GatewayView | None) -> list[Pod]:
    """The replicas to lose: unready first, then least cached value, least work left, youngest."""
    present = [pod for pod in pods if not pod.deleting]
    return sorted(present, key=lambda pod: _rank(pod, gateway))[: max(0, num)]


def _rank(pod: Pod, gateway: GatewayView | None) -> tuple[bool, bool, int, int, float, str]:
    endpoints = gateway.find_endpoints(pod.uid) if gateway is not None else ()
    unique = max((endpoint.unique_cached_tokens for endpoint in endpoints), default=0)
    work = sum(endpoint.open_requests for endpoint in endpoints)
    return pod.scheduled, pod.ready, unique, work, -pod.created_at, pod.name


def mark_victims(pods: list[Pod], victims: list[Pod]) -> list[MarkPod]:
    """Cordon the victims and make them cheap to delete; take both back from pods that stay after all."""
    chosen = {pod.uid for pod in victims}
    marks = [_cordon(pod) for pod in victims if not (pod.cordoned and pod.deletion_cost == VICTIM_COST)]
    # Only what the operator cordoned: a cordon without its cost is somebody's deliberate act.
    spared = (p for p in pods if p.uid not in chosen and not p.deleting and p.deletion_cost == VICTIM_COST)
    return marks + [_release(pod) for pod in spared]


def _cordon(pod: Pod) -> MarkPod:
    return MarkPod(
        pod.name,
        pod.uid,
        labels={labels.CORDONED: "true"},
        annotations={DELETION_COST: str(VICTIM_COST)},
        why="chosen to leave: least cached value, then least remaining work",
    )


def _release(pod: Pod) -> MarkPod:
    return MarkPod(
        pod.name,
        pod.uid,
        labels={labels.CORDONED: None},
        annotations={DELETION_COST: None},
        why="stays after all",
    )
