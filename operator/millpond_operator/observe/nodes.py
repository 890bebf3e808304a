"""Free room of the nodes, listed only when a rollout or a stuck replica makes it matter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from millpond_operator.clients.kube import KubeClient
from millpond_operator.desired.kinds import NODE, POD
from millpond_operator.errors import ForbiddenError
from millpond_operator.plan.capacity import NodeRoom, compute_rooms

Clock = Callable[[], float]
KEEP_SECONDS = 5.0
KEEP_FORBIDDEN_SECONDS = 600.0


class NodeWatcher:
    """Lists nodes and all pods, shared by all pools for a few seconds."""

    def __init__(self, kube: KubeClient, clock: Clock, *, enabled: bool) -> None:
        self._kube = kube
        self._clock = clock
        self._enabled = enabled
        self._lock = asyncio.Lock()
        self._rooms: tuple[NodeRoom, ...] | None = None
        self._until = float("-inf")

    async def fetch_rooms(self) -> tuple[NodeRoom, ...] | None:
        """Room per node; None where the operator may not see nodes (namespaced mode)."""
        if not self._enabled:
            return None
        async with self._lock:
            if self._clock() < self._until:
                return self._rooms
            try:
                nodes = await self._kube.list(NODE, None)
                pods = await self._kube.list(POD, None, fields="spec.nodeName!=")
                self._rooms = compute_rooms(nodes.items, pods.items)
                self._until = self._clock() + KEEP_SECONDS
            except ForbiddenError:
                self._rooms = None
                self._until = self._clock() + KEEP_FORBIDDEN_SECONDS
            return self._rooms
