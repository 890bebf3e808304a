"""Memory of the accelerators that a role's pods may get, read from the labels that device plugins put on nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from millpond_operator.api.errors import QuantityError
from millpond_operator.api.pool import RoleView
from millpond_operator.api.quantity import parse_bytes
from millpond_operator.plan.capacity import NodeRoom, may_run
from millpond_operator.plan.snapshot import DeviceMemory

MEMORY_LABELS = {
    "nvidia.com/gpu": ("nvidia.com/gpu.memory", "Mi"),
    "amd.com/gpu": ("amd.com/gpu.vram", "i"),
}
"""Label by resource, and the unit its value lacks: GPU feature discovery writes MiB, AMD's labeller "64G" for 64 GiB."""


def find_device_memory(
    rooms: Iterable[NodeRoom], role: RoleView, spec: Mapping[str, Any]
) -> DeviceMemory | None:
    """Memory of the accelerator a role asks for by count; None where it asks for none.

    Args:
        rooms: nodes that take pods.
        role: what one replica asks for.
        spec: pod spec with node selector and tolerations.
    """
    resource = next((name for name in MEMORY_LABELS if name in role.resources.limits), None)
    if resource is None:
        return None
    label, unit = MEMORY_LABELS[resource]
    usable = [room for room in rooms if resource in room.free and may_run(room, spec)]
    if not usable:
        return DeviceMemory(None, f"no node that the replicas may use has {resource}")
    told = {room.name: _parse(room.labels.get(label, ""), unit) for room in usable}
    silent = sorted(name for name, amount in told.items() if amount is None)
    if silent:
        return DeviceMemory(None, f"node {silent[0]} has no label {label}")
    name, amount = max(told.items(), key=lambda entry: (entry[1] or 0, entry[0]))
    return DeviceMemory(amount, f"label {label} of node {name}")


def _parse(text: str, unit: str) -> int | None:
    try:
        return parse_bytes(text + unit) or None
    except QuantityError:
        return None
