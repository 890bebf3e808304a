"""Devices asked for by resource claim: how many a replica needs, and how many are free on each node.

Kubernetes chooses devices by CEL. Counted here is what is certain: a class whose expression only joins equalities of the
driver and of attributes, and a request for an exact number without selectors of its own. For everything else the answer
is "unknown", never a wrong number; the scheduler decides then, as it does in the end anyway.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from millpond_operator.api.errors import QuantityError
from millpond_operator.api.pool import RoleView
from millpond_operator.api.quantity import parse_bytes
from millpond_operator.api.spec import PodResourceClaim
from millpond_operator.plan.snapshot import ClaimNeed, ClaimRoom, DeviceMemory

Obj = Mapping[str, Any]
Device = tuple[str, str, str]
"""Driver, pool and name: what identifies a device."""

_TERM = re.compile(
    r"""\s*device\.(?:driver|attributes\[(?P<q>["'])(?P<domain>[^"']+)(?P=q)\]\.(?P<attribute>\w+))"""
    r"""\s*==\s*(?:(?P<p>["'])(?P<text>[^"']*)(?P=p)|(?P<plain>true|false|\d+))\s*"""
)


@dataclass(frozen=True, slots=True)
class Selector:
    """A class's expression as equalities."""

    driver: str
    attributes: Mapping[str, Any]
    """Value by qualified name, as in "gpu.example.com/type"."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """What the cluster says about devices now."""

    slices: tuple[Obj, ...]
    claims: tuple[Obj, ...]
    classes: tuple[Obj, ...]


def list_used_claims(role: RoleView) -> tuple[tuple[PodResourceClaim, str | None], ...]:
    """Claims of the pod that the engine uses, each with the one request it uses, if it names one."""
    known = {claim.name: claim for template in role.templates for claim in template.resource_claims}
    return tuple((known[use.name], use.request) for use in role.resources.claims if use.name in known)


def read_need(spec: Obj, request: str | None) -> ClaimNeed | None:
    """Devices of one claim; None where the number or the class is not certain.

    Args:
        spec: of the ResourceClaim, or of the claim inside a template.
        request: the only request that counts; None for all of them.
    """
    requests = (spec.get("devices") or {}).get("requests") or ()
    chosen = [entry for entry in requests if request in (None, entry.get("name"))]
    exact = [entry.get("exactly") or {} for entry in chosen]
    plain = all(
        entry.get("deviceClassName")
        and not entry.get("selectors")
        and entry.get("allocationMode", "ExactCount") == "ExactCount"
        for entry in exact
    )
    names = {str(entry.get("deviceClassName")) for entry in exact}
    if not exact or not plain or len(names) != 1:
        return None
    return ClaimNeed(names.pop(), sum(int(entry.get("count") or 1) for entry in exact))


def add_needs(needs: Iterable[ClaimNeed | None]) -> ClaimNeed | None:
    """Devices of all claims of one role; None where one is not certain or they are of several classes."""
    found = list(needs)
    certain = [need for need in found if need is not None]
    if not found or len(certain) < len(found) or len({need.class_name for need in certain}) != 1:
        return None
    return ClaimNeed(certain[0].class_name, sum(need.num_devices for need in certain))


def find_room(need: ClaimNeed, inventory: Inventory) -> ClaimRoom | None:
    """Free devices of the need's class by node, and the memory of each; None where they cannot be counted."""
    selector = next(
        (parse_class(c) for c in inventory.classes if c["metadata"]["name"] == need.class_name), None
    )
    if selector is None:
        return None
    taken = {device for claim in inventory.claims for device in _list_allocated(claim)}
    free: dict[str, int] = {}
    memory: dict[str, DeviceMemory] = {}
    for found in _list_current(inventory.slices):
        spec = found["spec"]
        if spec.get("driver") != selector.driver:
            continue
        node = spec.get("nodeName")
        matching = [device for device in spec.get("devices") or () if _matches(device, selector)]
        if matching and (not node or any(device.get("consumesCounters") for device in matching)):
            return None  # shared by several nodes, or parts of one another: a plain count would be wrong
        place = (spec["driver"], spec["pool"]["name"])
        usable = [d for d in matching if (*place, d["name"]) not in taken and not _is_closed(d)]
        free[node] = free.get(node, 0) + len(usable)
        if matching:
            memory[node] = max(
                (_read_memory(device, node) for device in matching), key=lambda m: m.num_bytes or 0
            )
    return ClaimRoom(need, free, memory)


def parse_class(device_class: Obj) -> Selector | None:
    """A class as equalities; None where its expressions hold anything else, or no driver."""
    terms: dict[str, Any] = {}
    for entry in device_class["spec"].get("selectors") or ():
        for part in str((entry.get("cel") or {}).get("expression") or "").split("&&"):
            found = _TERM.fullmatch(part)
            if found is None:
                return None
            name = f"{found['domain']}/{found['attribute']}" if found["domain"] else "driver"
            terms[name] = found["text"] if found["p"] else _read_plain(found["plain"])
    driver = terms.pop("driver", None)
    return Selector(driver, terms) if isinstance(driver, str) and driver else None


def _read_plain(text: str) -> bool | int:
    return text == "true" if text in ("true", "false") else int(text)


def _list_current(slices: Iterable[Obj]) -> list[Obj]:
    """Slices of the newest generation of each pool of devices: older ones are about to go."""
    found = list(slices)
    newest: dict[tuple[str, str], int] = {}
    for entry in found:
        key = (entry["spec"]["driver"], entry["spec"]["pool"]["name"])
        newest[key] = max(newest.get(key, 0), int(entry["spec"]["pool"].get("generation") or 0))
    return [
        e
        for e in found
        if int(e["spec"]["pool"].get("generation") or 0)
        == newest[e["spec"]["driver"], e["spec"]["pool"]["name"]]
    ]


def _list_allocated(claim: Obj) -> list[Device]:
    allocation = (claim.get("status") or {}).get("allocation") or {}
    results = (allocation.get("devices") or {}).get("results") or ()
    return [(r["driver"], r["pool"], r["device"]) for r in results if not r.get("adminAccess")]


def _matches(device: Obj, selector: Selector) -> bool:
    own = device.get("attributes") or {}
    return all(_read_attribute(own, name, selector.driver) == v for name, v in selector.attributes.items())


def _read_attribute(own: Obj, name: str, driver: str) -> Any:
    """Value of an attribute; one without a domain belongs to the driver's."""
    domain, _, short = name.partition("/")
    entry = own.get(name) or (own.get(short) if domain == driver else None) or {}
    return next(iter(entry.values()), None)


def _is_closed(device: Obj) -> bool:
    return any(taint.get("effect") in ("NoSchedule", "NoExecute") for taint in device.get("taints") or ())


def _read_memory(device: Obj, node: str) -> DeviceMemory:
    entry = (device.get("capacity") or {}).get("memory") or {}
    try:
        amount = parse_bytes(entry.get("value") or "0")
    except QuantityError:
        amount = 0
    if amount <= 0:
        return DeviceMemory(None, f"device {device['name']} of node {node} tells no memory")
    return DeviceMemory(amount, f"device {device['name']} of node {node}")


def pick_memory(room: ClaimRoom, nodes: Iterable[str]) -> DeviceMemory:
    """The most memory one device has among the given nodes; unknown while one of them does not tell."""
    told = [room.memory[name] for name in nodes if name in room.memory]
    silent = next((memory for memory in told if memory.num_bytes is None), None)
    if silent is not None or not told:
        return silent or DeviceMemory(
            None, f"no node that the replicas may use has devices of class {room.need.class_name}"
        )
    return max(told, key=lambda memory: memory.num_bytes or 0)
