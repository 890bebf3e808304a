"""Full lists of every kind: the first fill of the store, and the correction of what a watch may have missed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from millpond_common.contract import labels
from millpond_operator.clients.kube import KubeClient, Obj
from millpond_operator.desired.kinds import CHILDREN, POD, POOL, Kind
from millpond_operator.errors import KubeError
from millpond_operator.loop.metrics import Metrics
from millpond_operator.observe.store import GATEWAY_OWNER, Store, find_owner_pool

LOG = structlog.get_logger(__name__)
Clock = Callable[[], float]
Mark = Callable[[str, str], None]

WATCHED = (POOL, POD, *CHILDREN)
SELECTOR = f"{labels.MANAGED_BY}={labels.MANAGER}"
"""Of every child and its pods, so that the store never holds what is not ours."""
FIRST_RETRY_SECONDS = 2.0
EARLY_SECONDS = (5.0, 30.0)
"""Pauses before the lists that follow the first. The watches begin beside the first one, each with a list of its own:
of what goes in between, no watch tells, and a pool whose last replica went then would drain for a whole period."""


def get_selector(kind: Kind) -> str | None:
    """Label selector of a kind's lists and watches."""
    return None if kind == POOL else SELECTOR


class Resync:
    """Lists every kind again and again."""

    def __init__(
        self,
        kube: KubeClient,
        store: Store,
        *,
        namespaces: tuple[str, ...],
        mark: Mark,
        metrics: Metrics,
        clock: Clock,
        period_seconds: float,
        early_seconds: Sequence[float] = EARLY_SECONDS,
    ) -> None:
        self._kube = kube
        self._store = store
        self._namespaces = namespaces
        self._mark = mark
        self._metrics = metrics
        self._clock = clock
        self._period_seconds = period_seconds
        self._early_seconds = tuple(early_seconds)
        self._started_at = clock()
        self._succeeded_at: float | None = None
        self.synced = asyncio.Event()

    @property
    def age_seconds(self) -> float | None:
        """Seconds since every kind was listed; None before the first time."""
        return None if self._succeeded_at is None else self._clock() - self._succeeded_at

    @property
    def blind_seconds(self) -> float:
        """Seconds since every kind was listed, or since the start where that never succeeded: what an alert watches."""
        return self._clock() - (self._started_at if self._succeeded_at is None else self._succeeded_at)

    async def run(self) -> None:
        """List until cancelled, early again after the first time; a failed round is repeated soon."""
        early = iter(self._early_seconds)
        while True:
            try:
                await self.run_once()
                delay = min(self._period_seconds, next(early, self._period_seconds))
            except KubeError as error:
                LOG.warning("resync failed", error=str(error))
                delay = min(self._period_seconds, FIRST_RETRY_SECONDS)
            await asyncio.sleep(delay)

    async def run_once(self) -> None:
        """List every kind once and mark the pools whose objects had changed unnoticed.

        Raises:
            KubeError: a list was refused; what was listed before it is kept.
        """
        for kind in WATCHED:
            await self._list(kind)
        self._succeeded_at = self._clock()
        first = not self.synced.is_set()
        self.synced.set()
        if first:
            LOG.info("first lists are in", pools=len(self._store.keys(POOL)))
            for namespace, name in self._store.keys(POOL):
                self._mark(namespace, name)

    async def _list(self, kind: Kind) -> None:
        first = not self._store.is_synced((kind,))
        items: list[Obj] = []
        version = 0
        for namespace in self._namespaces or (None,):
            found = await self._kube.list(kind, namespace, labels=get_selector(kind))
            items += found.items
            # With several namespaces the oldest list decides what may be missing from the store.
            version = found.resource_version if version == 0 else min(version, found.resource_version)
        owners = {key: self._store.get(kind, *key) for key in self._store.keys(kind)}
        changed = self._store.replace(kind, items, version=version)
        if not first:
            self._metrics.watch_repairs.labels(kind.name).inc(len(changed))
        for key in changed:
            now = self._store.get(kind, *key)
            known = now or owners.get(key)
            if known is not None:
                mark_owner(self._store, kind, known.body, self._mark)


def mark_owner(store: Store, kind: Kind, obj: object, mark: Mark) -> None:
    """Mark the pool an object belongs to, or every pool of the namespace for a gateway's."""
    assert isinstance(obj, dict)
    namespace, name = str(obj["metadata"].get("namespace") or ""), str(obj["metadata"]["name"])
    if kind == POOL:
        mark(namespace, name)
        return
    owner = find_owner_pool(obj)
    if owner == GATEWAY_OWNER:
        for stored in store.list_in_namespace(POOL, namespace):
            mark(namespace, str(stored.body["metadata"]["name"]))
    elif owner is not None and store.get(POOL, namespace, owner) is not None:
        mark(namespace, owner)
