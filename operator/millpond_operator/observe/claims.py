"""Devices that pools ask for by resource claim; asked only for pools that do, since other clusters may lack the API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from millpond_operator.api.pool import InferencePool, RoleView, list_roles
from millpond_operator.api.spec import PodResourceClaim
from millpond_operator.clients.kube import KubeClient
from millpond_operator.desired.kinds import (
    DEVICE_CLASS,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
)
from millpond_operator.errors import KubeError
from millpond_operator.plan.claims import Inventory, add_needs, find_room, list_used_claims, read_need
from millpond_operator.plan.snapshot import ClaimNeed, ClaimRoom

Clock = Callable[[], float]
KEEP_SPEC_SECONDS = 300.0
"""The spec of a claim or template cannot change; it can only be made anew under its name."""
KEEP_MISSING_SECONDS = 15.0
KEEP_INVENTORY_SECONDS = 5.0
KEEP_FAILED_SECONDS = 600.0
"""A role without the permission, or a cluster without the API, is not asked again for this long."""
MAX_SPECS = 10_000


class ClaimWatcher:
    """What claims ask for, and the devices that are free."""

    def __init__(self, kube: KubeClient, clock: Clock, *, cluster_wide: bool) -> None:
        self._kube = kube
        self._clock = clock
        self._cluster_wide = cluster_wide
        self._specs: dict[tuple[str, str, str], tuple[float, Mapping[str, Any] | None]] = {}
        self._inventory: Inventory | None = None
        self._until = float("-inf")
        self._lock = asyncio.Lock()

    async def fetch_needs(self, pool: InferencePool) -> dict[str, ClaimNeed]:
        """Devices that one replica of each role (Both, Prefill, Decode) asks for; absent where not certain."""
        needs: dict[str, ClaimNeed] = {}
        for role in list_roles(pool):
            need = await self._fetch_need(pool.metadata.namespace, role)
            if need is not None:
                needs[role.role] = need
        return needs

    async def fetch_rooms(self, needs: Mapping[str, ClaimNeed]) -> dict[str, ClaimRoom]:
        """Free devices by role; absent where they cannot be counted, and without a call where nothing is needed."""
        inventory = await self._fetch_inventory() if needs and self._cluster_wide else None
        if inventory is None:
            return {}
        rooms = {role: find_room(need, inventory) for role, need in needs.items()}
        return {role: room for role, room in rooms.items() if room is not None}

    async def _fetch_need(self, namespace: str, role: RoleView) -> ClaimNeed | None:
        used = list_used_claims(role)
        specs = [await self._fetch_spec(namespace, claim) for claim, _ in used]
        pairs = zip(specs, used, strict=True)
        return add_needs(
            read_need(spec, request) if spec is not None else None for spec, (_, request) in pairs
        )

    async def _fetch_spec(self, namespace: str, claim: PodResourceClaim) -> Mapping[str, Any] | None:
        kind = RESOURCE_CLAIM if claim.resource_claim_name is not None else RESOURCE_CLAIM_TEMPLATE
        name = claim.resource_claim_name or claim.resource_claim_template_name or ""
        key = (kind.plural, namespace, name)
        until, known = self._specs.get(key, (float("-inf"), None))
        if self._clock() < until:
            return known
        try:
            body = await self._kube.get(kind, namespace, name)
            spec: Mapping[str, Any] = body["spec"] if kind == RESOURCE_CLAIM else body["spec"]["spec"]
            entry: tuple[float, Mapping[str, Any] | None] = (self._clock() + KEEP_SPEC_SECONDS, spec)
        except KubeError:
            entry = (self._clock() + KEEP_MISSING_SECONDS, None)
        if len(self._specs) >= MAX_SPECS:
            self._specs.clear()
        self._specs[key] = entry
        return entry[1]

    async def _fetch_inventory(self) -> Inventory | None:
        async with self._lock:
            if self._clock() < self._until:
                return self._inventory
            try:
                kinds = (RESOURCE_SLICE, RESOURCE_CLAIM, DEVICE_CLASS)
                slices, claims, classes = [(await self._kube.list(kind, None)).items for kind in kinds]
                self._inventory = Inventory(slices, claims, classes)
                self._until = self._clock() + KEEP_INVENTORY_SECONDS
            except KubeError:
                self._inventory = None
                self._until = self._clock() + KEEP_FAILED_SECONDS
            return self._inventory
