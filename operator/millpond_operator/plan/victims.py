"""Which replicas leave when a count falls, and how the cluster is told."""

from __future__ import annotations

from collections.abc import Mapping

from millpond_common.contract import labels
from millpond_operator.plan.actions import MarkPod
from millpond_operator.plan.snapshot import GatewayView, Pod
from millpond_operator.scaling.victim import Candidate, rank_victims

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
VICTIM_COST = -1000
"""Below the default of 0, so the ReplicaSet controller takes these first."""


def choose_victims(
    pods: list[Pod],
    num: int,
    gateway: GatewayView | None,
    *,
    values: Mapping[str, float] | None = None,
    zones: Mapping[str, str] | None = None,
) -> list[Pod]:
    """The replicas to lose: unready first, then least cached value, least work left, youngest; no zone is emptied first.

    Args:
        pods: of one revision.
        num: how many leave.
        gateway: what gateways expect in each replica's cache and have open on it.
        values: cached values the engines told, by UID; used where every ready replica has one, since the two
            measures do not compare.
        zones: by node; a replica whose zone is not known is in none.
    """
    present = sorted((p for p in pods if not p.deleting), key=lambda p: (p.scheduled, -p.created_at, p.name))
    known = values if values and all(pod.uid in values for pod in present if pod.ready) else {}
    by_uid = {pod.uid: pod for pod in present}
    ranked = rank_victims([_make_candidate(pod, gateway, known, zones or {}) for pod in present])
    return [by_uid[candidate.pod] for candidate in ranked[: max(0, num)]]


def _make_candidate(
    pod: Pod, gateway: GatewayView | None, values: Mapping[str, float], zones: Mapping[str, str]
) -> Candidate:
    endpoints = gateway.find_endpoints(pod.uid) if gateway is not None else ()
    unique = max((endpoint.unique_cached_tokens for endpoint in endpoints), default=0)
    return Candidate(
        pod=pod.uid,
        is_ready=pod.ready,
        cached_value=values.get(pod.uid, float(unique)),
        open_requests=sum(endpoint.open_requests for endpoint in endpoints),
        zone=zones.get(pod.node, ""),
    )


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
