"""Which kind each node is, so that start times are kept apart by it. Nodes are listed when one is met that is not known."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from millpond_operator.clients.kube import KubeClient
from millpond_operator.desired.kinds import NODE
from millpond_operator.errors import KubeError
from millpond_operator.scaling.starts import name_node_kind

Clock = Callable[[], float]
PAUSE_SECONDS = 30.0
"""Between two lists at least: a node whose object is late is asked for again."""
PAUSE_FAILED_SECONDS = 600.0
"""A role without the permission is not asked again for this long."""


class NodeKinds:
    """Kinds by node name; none where the operator may not see nodes (namespaced mode)."""

    def __init__(self, kube: KubeClient, clock: Clock, *, enabled: bool) -> None:
        self._kube = kube
        self._clock = clock
        self._until = float("-inf") if enabled else float("inf")
        self._kinds: Mapping[str, str] = {}

    def get(self) -> Mapping[str, str]:
        """What is known."""
        return self._kinds

    async def refresh(self, nodes: Collection[str]) -> None:
        """List nodes if one of these is unknown."""
        if set(nodes) <= self._kinds.keys() or self._clock() < self._until:
            return
        try:
            listed = await self._kube.list(NODE, None)
        except KubeError:
            self._until = self._clock() + PAUSE_FAILED_SECONDS
            return
        self._kinds = {
            str(node["metadata"]["name"]): name_node_kind(node["metadata"].get("labels") or {})
            for node in listed.items
        }
        self._until = self._clock() + PAUSE_SECONDS
