"""Reports of the namespaces' gateways, fetched once for all pools of a namespace and kept for as long as each may be old."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from millpond_common.contract.gateway_report import GatewayReport
from millpond_operator.clients.gateway import GatewayCaller
from millpond_operator.errors import GatewayCallError
from millpond_operator.plan.snapshot import GatewayView, Pod

SILENT_SECONDS = 5.0
"""Pause after a gateway did not answer."""
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class FetchedReport:
    """The answer of one gateway pod."""

    pod_uid: str
    report: GatewayReport | None
    error: str
    at: float
    """Of the cache's clock, when the call began."""


class ReportCache:
    """The latest report of each gateway pod."""

    def __init__(self, caller: GatewayCaller, clock: Clock) -> None:
        self._caller = caller
        self._clock = clock
        self._kept: dict[str, FetchedReport] = {}
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def fetch_view(
        self, namespace: str, pool: str, pods: Iterable[Pod], *, max_age: float
    ) -> GatewayView:
        """What the ready gateway pods say about one pool, from reports at most `max_age` seconds old."""
        found = await self.fetch_reports(namespace, pods, max_age=max_age)
        synced = [entry.report for entry in found if entry.report is not None and entry.report.synced]
        return GatewayView(
            num_ready=len(found),
            num_reporting=len(synced),
            reports=tuple(entry for report in synced for entry in report.pools if entry.pool == pool),
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
            await asyncio.gather(*(self._fetch(pod) for pod in due))
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

    async def _fetch(self, pod: Pod) -> None:
        at = self._clock()
        try:
            self._kept[pod.uid] = FetchedReport(pod.uid, await self._caller.fetch_report(pod.address), "", at)
        except GatewayCallError as error:
            self._kept[pod.uid] = FetchedReport(pod.uid, None, str(error), at)
