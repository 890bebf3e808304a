"""How many further replicas fit on the nodes, from allocatable minus the requests of all pods.

An estimate on the safe side: it honours readiness, cordons, node selectors and taints, not affinity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from millpond_operator.api.pool import RoleView
from millpond_operator.api.quantity import parse_quantity
from millpond_operator.plan.snapshot import Capacity, ClaimRoom

Amounts = dict[str, Decimal]
ENDED = ("Succeeded", "Failed")
PODS = "pods"


@dataclass(slots=True)
class NodeRoom:
    """What is left on one node."""

    name: str
    labels: Mapping[str, str]
    taints: tuple[Mapping[str, Any], ...]
    free: Amounts = field(default_factory=dict)
    total: Amounts = field(default_factory=dict)
    """Allocatable, whatever runs there."""


def compute_rooms(
    nodes: Iterable[Mapping[str, Any]], pods: Iterable[Mapping[str, Any]]
) -> tuple[NodeRoom, ...]:
    """Free room of every node that takes pods."""
    rooms = {str(node["metadata"]["name"]): _make_room(node) for node in nodes if _takes_pods(node)}
    for pod in pods:
        room = rooms.get((pod.get("spec") or {}).get("nodeName") or "")
        if room is None or (pod.get("status") or {}).get("phase") in ENDED:
            continue
        for resource, amount in sum_requests(pod["spec"]).items():
            room.free[resource] = room.free.get(resource, Decimal(0)) - amount
        room.free[PODS] = room.free.get(PODS, Decimal(0)) - 1
    return tuple(rooms.values())


def compute_capacity(
    rooms: tuple[NodeRoom, ...],
    roles: Iterable[tuple[str, RoleView, Mapping[str, Any]]],
    claims: Mapping[str, ClaimRoom] | None = None,
) -> Capacity:
    """Further replicas of each role (label, view, pod spec), and the largest free amounts on one node.

    A role that asks for devices by claim has a number only where those can be counted: `claims`, by label.
    """
    fitting, free, beyond = {}, {}, {}
    for label, role, spec in roles:
        usable = [room for room in rooms if may_run(room, spec)]
        asked = sum_requests(spec) | {PODS: Decimal(1)}
        claimed = (claims or {}).get(label)
        if claimed is not None:
            fitting[label] = sum(_count_claimed(room, asked, claimed) for room in usable)
            devices = max((claimed.free.get(room.name, 0) for room in usable), default=0)
            free[f"devices of class {claimed.need.class_name}"] = str(devices)
        elif not role.resources.claims:
            fitting[label] = sum(_count_fitting(room, asked) for room in usable)
        for resource in {**role.resources.limits, **role.resources.requests}:
            largest = max((room.free.get(resource, Decimal(0)) for room in usable), default=Decimal(0))
            free[resource] = format_amount(resource, largest)
            most = max((room.total.get(resource, Decimal(0)) for room in usable), default=Decimal(0))
            if usable and asked.get(resource, Decimal(0)) > most:
                beyond[resource] = format_amount(resource, most)
    return Capacity(fitting_replicas=fitting, free=free, beyond=beyond)


def sum_requests(spec: Mapping[str, Any]) -> Amounts:
    """What the scheduler sets aside for a pod: the larger of all containers' sum and the largest init container."""
    total: Amounts = {}
    for container in spec.get("containers") or ():
        for resource, amount in _get_requests(container).items():
            total[resource] = total.get(resource, Decimal(0)) + amount
    for container in spec.get("initContainers") or ():
        for resource, amount in _get_requests(container).items():
            total[resource] = max(total.get(resource, Decimal(0)), amount)
    return total


def format_amount(resource: str, amount: Decimal) -> str:
    """Readable text: bytes in Gi, other things as numbers; never below zero."""
    amount = max(amount, Decimal(0))
    if resource in ("memory", "ephemeral-storage"):
        return f"{amount / 2**30:.1f}Gi"
    return f"{amount.normalize():f}"


def _get_requests(container: Mapping[str, Any]) -> Amounts:
    resources = container.get("resources") or {}
    merged = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {str(name): parse_quantity(amount) for name, amount in merged.items()}


def _count_fitting(room: NodeRoom, asked: Amounts) -> int:
    counts = [int(room.free.get(name, Decimal(0)) // amount) for name, amount in asked.items() if amount > 0]
    return max(0, min(counts, default=0))


def _count_claimed(room: NodeRoom, asked: Amounts, claimed: ClaimRoom) -> int:
    devices = claimed.free.get(room.name, 0) // claimed.need.num_devices
    return min(_count_fitting(room, asked), devices)


def _takes_pods(node: Mapping[str, Any]) -> bool:
    conditions = (node.get("status") or {}).get("conditions") or ()
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return ready and not (node.get("spec") or {}).get("unschedulable")


def _make_room(node: Mapping[str, Any]) -> NodeRoom:
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    total = {str(name): parse_quantity(amount) for name, amount in allocatable.items()}
    return NodeRoom(
        name=node["metadata"]["name"],
        labels=node["metadata"].get("labels") or {},
        taints=tuple((node.get("spec") or {}).get("taints") or ()),
        free=dict(total),
        total=total,
    )


def may_run(room: NodeRoom, spec: Mapping[str, Any]) -> bool:
    """Whether the pod's selector and tolerations let it onto the node."""
    selected = all(room.labels.get(k) == v for k, v in (spec.get("nodeSelector") or {}).items())
    tolerations = spec.get("tolerations") or ()
    hard = (taint for taint in room.taints if taint.get("effect") in ("NoSchedule", "NoExecute"))
    return selected and all(any(_tolerates(t, taint) for t in tolerations) for taint in hard)


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if not toleration.get("key"):
        return toleration.get("operator") == "Exists"
    if toleration["key"] != taint.get("key"):
        return False
    return toleration.get("operator") == "Exists" or (toleration.get("value") or "") == (
        taint.get("value") or ""
    )
