"""Kind and zone of each node: start times are kept apart by kind, replicas leave no zone empty. Listed when an unknown one is met."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from millpond_operator.clients.kube import KubeClient
from millpond_operator.desired.kinds import NODE
from millpond_operator.errors import KubeError
from millpond_operator.scaling.starts import name_node_kind

Clock = Callable[[], float]
ZONE = "topology.kubernetes.io/zone"
PAUSE_SECONDS = 30.0
"""Between two lists at least: a node whose object is late is asked for again."""
PAUSE_FAILED_SECONDS = 600.0
"""A role without the permission is not asked again for this long."""


class NodeKinds:
    """Kinds and zones by node name; none where the operator may not see nodes (namespaced mode)."""

    def __init__(self, kube: KubeClient, clock: Clock, *, enabled: bool) -> None:
        self._kube = kube
        self._clock = clock
        self._lock = asyncio.Lock()
        self._until = float("-inf") if enabled else float("inf")
        self._kinds: Mapping[str, str] = {}
        self._zones: Mapping[str, str] = {}

    def get(self) -> Mapping[str, str]:
        """Known kinds."""
        return self._kinds

    def get_zones(self) -> Mapping[str, str]:
        """Known zones; absent where a node names none."""
        return self._zones

    async def refresh(self, nodes: Collection[str]) -> None:
        """List nodes if one of these is unknown; who asks meanwhile waits for the same list."""
        async with self._lock:
            if not set(nodes) <= self._kinds.keys() and self._clock() >= self._until:
                await self._list()

    async def _list(self) -> None:
        try:
            listed = await self._kube.list(NODE, None)
        except KubeError:
            self._until = self._clock() + PAUSE_FAILED_SECONDS
            return
        labels = {str(n["metadata"]["name"]): n["metadata"].get("labels") or {} for n in listed.items}
        self._kinds = {name: name_node_kind(told) for name, told in labels.items()}
        self._zones = {name: str(told[ZONE]) for name, told in labels.items() if told.get(ZONE)}
        self._until = self._clock() + PAUSE_SECONDS
