"""Reports of the namespaces' gateways, fetched once for all pools of a namespace and kept for as long as each may be old."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from millpond_common.contract.gateway_report import GatewayReport, PoolReport
from millpond_operator.clients.gateway import GatewayCaller
from millpond_operator.errors import GatewayCallError
from millpond_operator.plan.snapshot import GatewayView, Pod

LOST_CALLS = 2
"""A gateway that leaves so many calls in a row unanswered has gone silent; one lost call says nothing."""
SILENT_SECONDS = 5.0
"""Pause after a gateway did not answer."""
Clock = Callable[[], float]
Mark = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class FetchedReport:
    """The answer of one gateway pod."""

    pod_uid: str
    report: GatewayReport | None
    error: str
    at: float
    """Of the cache's clock, when the call began."""
    pools: Mapping[str, PoolReport] = field(default_factory=dict)
    """What a synced gateway says, by pool."""
    num_lost: int = 0
    """Calls in a row that it left unanswered."""
    routes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Replicas it routes to, by pool, when it last answered."""


class ReportCache:
    """The latest report of each gateway pod; pools for which it changed something are marked, so that none has to ask."""

    def __init__(self, caller: GatewayCaller, clock: Clock, *, mark: Mark | None = None) -> None:
        self._caller = caller
        self._mark = mark
        self._clock = clock
        self._kept: dict[str, FetchedReport] = {}
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def fetch_view(
        self, namespace: str, pool: str, pods: Iterable[Pod], *, max_age: float
    ) -> GatewayView:
        """What the ready gateway pods say about one pool, from reports at most `max_age` seconds old."""
        found = await self.fetch_reports(namespace, pods, max_age=max_age)
        synced = [entry for entry in found if entry.report is not None and entry.report.synced]
        return GatewayView(
            num_ready=len(found),
            num_reporting=len(synced),
            reports=tuple(entry.pools[pool] for entry in found if pool in entry.pools),
            error=next((entry.error for entry in found if entry.error), ""),
            observed_at=min((entry.at for entry in found), default=0.0),
        )

    async def fetch_reports(
        self, namespace: str, pods: Iterable[Pod], *, max_age: float
    ) -> tuple[FetchedReport, ...]:
        """The report of each ready gateway pod, or why it has none, at most `max_age` seconds old."""
        ready = [pod for pod in pods if pod.ready and not pod.deleting and pod.address]
        async with self._locks[namespace]:
            due = [pod for pod in ready if self._is_due(pod, max_age)]
            await asyncio.gather(*(self._fetch(namespace, pod) for pod in due))
        return tuple(self._kept[pod.uid] for pod in ready)

    def _is_due(self, pod: Pod, max_age: float) -> bool:
        kept = self._kept.get(pod.uid)
        if kept is None:
            return True
        # A gateway that hangs costs its time-out, so it is not asked at every look.
        return kept.at < self._clock() - (max(max_age, SILENT_SECONDS) if kept.error else max_age)

    def forget_others(self, living: set[str]) -> None:
        """Drop reports of pods that are gone."""
        self._kept = {uid: kept for uid, kept in self._kept.items() if uid in living}

    async def _fetch(self, namespace: str, pod: Pod) -> None:
        before, at = self._kept.get(pod.uid), self._clock()
        try:
            report = await self._caller.fetch_report(pod.address)
            pools = {entry.pool: entry for entry in report.pools} if report.synced else {}
            now = FetchedReport(pod.uid, report, "", at, pools, routes=_find_routes(pools))
        except GatewayCallError as error:
            num_lost = before.num_lost + 1 if before is not None else 1
            routes = before.routes if before is not None else {}
            now = FetchedReport(pod.uid, None, str(error), at, num_lost=num_lost, routes=routes)
        self._kept[pod.uid] = now
        if before is None or self._mark is None:
            return
        for pool in list_changed(before, now):
            self._mark(namespace, pool)


def list_changed(before: FetchedReport, now: FetchedReport) -> list[str]:
    """Pools for which the later answer of a gateway says something else about who is routed to."""
    names = sorted(before.routes.keys() | now.routes.keys())
    if (before.num_lost >= LOST_CALLS) != (now.num_lost >= LOST_CALLS):
        return names
    return [name for name in names if before.routes.get(name) != now.routes.get(name)]


def _find_routes(pools: Mapping[str, PoolReport]) -> dict[str, frozenset[str]]:
    return {
        name: frozenset(e.pod_uid for e in report.endpoints if e.routable) for name, report in pools.items()
    }
