"""HorizontalPodAutoscalers that target pools; KEDA makes such too. Listed now and then, since they explain and decide nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from millpond_common.contract import labels
from millpond_operator.clients.kube import KubeClient
from millpond_operator.desired.kinds import SCALER
from millpond_operator.errors import KubeError

Clock = Callable[[], float]
KEEP_SECONDS = 30.0
KEEP_FAILED_SECONDS = 600.0
"""A role without the permission, or a cluster without the API, is not asked again for this long."""


class ScalerWatcher:
    """Names of the HPAs of a namespace, by the pool they target."""

    def __init__(self, kube: KubeClient, clock: Clock, *, keep_seconds: float = KEEP_SECONDS) -> None:
        self._kube = kube
        self._keep_seconds = keep_seconds
        self._clock = clock
        self._known: dict[str, tuple[float, Mapping[str, tuple[str, ...]]]] = {}

    def get_names(self, namespace: str, pool: str) -> tuple[str, ...]:
        """HPAs that wanted to set this pool's count when they were listed last; none where the operator may not look."""
        _, found = self._known.get(namespace, (0.0, {}))
        return found.get(pool, ())

    async def refresh(self, namespace: str) -> None:
        """List them again when the last list is old."""
        until, known = self._known.get(namespace, (float("-inf"), {}))
        if self._clock() < until:
            return
        # The pools of a namespace have their turns together: one of them asks for all.
        self._known[namespace] = (self._clock() + self._keep_seconds, known)
        try:
            listed = await self._kube.list(SCALER, namespace)
        except KubeError:
            self._known[namespace] = (self._clock() + KEEP_FAILED_SECONDS, {})
            return
        self._known[namespace] = (self._clock() + self._keep_seconds, group_by_pool(listed.items))


def group_by_pool(scalers: Iterable[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Names of HPAs by the InferencePool of our group that each targets."""
    grouped: dict[str, list[str]] = defaultdict(list)
    for scaler in scalers:
        target = (scaler.get("spec") or {}).get("scaleTargetRef") or {}
        group = str(target.get("apiVersion") or "").partition("/")[0]
        if (group, target.get("kind")) == (labels.GROUP, labels.KIND):
            grouped[str(target.get("name"))].append(str(scaler["metadata"]["name"]))
    return {pool: tuple(sorted(names)) for pool, names in grouped.items()}
