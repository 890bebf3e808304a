"""Kubernetes events about pools: equal ones are counted in one object, across restarts of the operator too."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from millpond_common.contract.labels import MANAGER
from millpond_operator.api.pool import PoolMetadata
from millpond_operator.clients.kube import KubeClient
from millpond_operator.desired.kinds import EVENT, POOL
from millpond_operator.desired.manifest import compute_digest
from millpond_operator.errors import ConflictError, NotFoundError
from millpond_operator.execute.executor import Fence
from millpond_operator.plan.actions import EventNote

MAX_MESSAGE = 1024
"""Bound of the API server."""


class EventWriter:
    """Posts events in the pool's namespace."""

    def __init__(self, kube: KubeClient, *, fence: Fence, instance: str) -> None:
        self._kube = kube
        self._fence = fence
        self._instance = instance

    async def write(self, pool: PoolMetadata, note: EventNote, now: float) -> None:
        """Post the event, or raise the count of the one that says the same.

        Raises:
            KubeError: the write was refused.
            NotLeaderError: another instance leads by now.
        """
        event = make_event(pool, note, now, instance=self._instance)
        self._fence()
        try:
            await self._kube.create(EVENT, pool.namespace, event, manager=MANAGER)
        except ConflictError:
            await self._count(pool, event)

    async def _count(self, pool: PoolMetadata, event: dict[str, Any]) -> None:
        name = event["metadata"]["name"]
        try:
            known = await self._kube.get(EVENT, pool.namespace, name)
            patch = {"count": int(known.get("count") or 1) + 1, "lastTimestamp": event["lastTimestamp"]}
            await self._kube.merge(EVENT, pool.namespace, name, patch, manager=MANAGER)
        except NotFoundError:
            return  # it expired between the two calls; the cause will come again


def make_event(pool: PoolMetadata, note: EventNote, now: float, *, instance: str) -> dict[str, Any]:
    """The event object; its name is a digest of what it says, which makes equal events one."""
    kind = "Warning" if note.warning else "Normal"
    message = note.message if len(note.message) <= MAX_MESSAGE else note.message[: MAX_MESSAGE - 1] + "…"
    digest = compute_digest([pool.uid, kind, str(note.reason), message])
    stamp = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{pool.name}.{digest}", "namespace": pool.namespace},
        "involvedObject": {
            "apiVersion": POOL.api_version,
            "kind": POOL.name,
            "name": pool.name,
            "namespace": pool.namespace,
            "uid": pool.uid,
        },
        "type": kind,
        "reason": str(note.reason),
        "action": note.action,
        "message": message,
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
        "source": {"component": MANAGER},
        "reportingComponent": MANAGER,
        "reportingInstance": instance,
    }
