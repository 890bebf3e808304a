"""Which replicas leave when a count falls, and how the cluster is told."""

from __future__ import annotations

from collections.abc import Mapping

from millpond_common.contract import labels
from millpond_operator.plan.actions import MarkPod
from millpond_operator.plan.snapshot import GatewayView, Pod

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
VICTIM_COST = -1000
"""Below the default of 0, so the ReplicaSet controller takes these first."""


def choose_victims(
    pods: list[Pod],
    num: int,
    gateway: GatewayView | None,
    values: Mapping[str, float] | None = None,
) -> list[Pod]:
    """The replicas to lose: unready first, then least cached value, least work left, youngest.

    Args:
        pods: of one revision.
        num: how many leave.
        gateway: what gateways expect in each replica's cache and have open on it.
        values: cached values the engines told, by UID; used where every ready replica has one, since the two
            measures do not compare.
    """
    present = [pod for pod in pods if not pod.deleting]
    known = values if values and all(pod.uid in values for pod in present if pod.ready) else {}
    return sorted(present, key=lambda pod: _rank(pod, gateway, known))[: max(0, num)]


def _rank(
    pod: Pod, gateway: GatewayView | None, values: Mapping[str, float]
) -> tuple[bool, bool, float, int, float, str]:
    endpoints = gateway.find_endpoints(pod.uid) if gateway is not None else ()
    unique = max((endpoint.unique_cached_tokens for endpoint in endpoints), default=0)
    work = sum(endpoint.open_requests for endpoint in endpoints)
    return pod.scheduled, pod.ready, values.get(pod.uid, unique), work, -pod.created_at, pod.name


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
