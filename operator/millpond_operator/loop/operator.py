"""One operator instance without kopf: store, observer, executor, tasks, Lease, servers; wired once, here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import structlog
from lightkube.config.kubeconfig import SingleConfig

from millpond_common.contract.reasons import ConditionType
from millpond_operator.clients.gateway import Caller, EngineCaller
from millpond_operator.clients.kube import KubeClient, Obj
from millpond_operator.desired.kinds import POD, POOL, SECRET, Kind
from millpond_operator.execute.events import EventWriter
from millpond_operator.execute.executor import Executor
from millpond_operator.execute.status import StatusWriter
from millpond_operator.loop.autoscaler import Autoscaler
from millpond_operator.loop.health import AdminServer, make_check_route, make_metrics_route
from millpond_operator.loop.lease import LeaseKeeper
from millpond_operator.loop.manager import Manager
from millpond_operator.loop.metrics import Metrics
from millpond_operator.loop.reconciler import Reconciler, Scaler
from millpond_operator.loop.resync import Resync, mark_owner
from millpond_operator.loop.settings import OperatorSettings
from millpond_operator.observe.claims import ClaimWatcher
from millpond_operator.observe.node_kinds import NodeKinds
from millpond_operator.observe.nodes import NodeWatcher
from millpond_operator.observe.observer import Observer
from millpond_operator.observe.probes import Prober
from millpond_operator.observe.progress import FetchProgress
from millpond_operator.observe.references import ReferenceChecker
from millpond_operator.observe.reports import ReportCache
from millpond_operator.observe.scalers import ScalerWatcher
from millpond_operator.observe.store import Store

LOG = structlog.get_logger(__name__)
MISSED_RESYNCS = 3
"""Periods without a successful full list after which the process is no longer alive."""
HOUSEKEEPING_SECONDS = 30.0


class Operator:
    """Everything of one instance; `take_event` is where watches enter."""

    def __init__(
        self,
        settings: OperatorSettings,
        connection: SingleConfig,
        gateway: Caller,
        *,
        scaler: Scaler | None = None,
    ) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.store = Store()
        self.kube = KubeClient(connection, observer=self.metrics.observe_call)
        # Connections of its own: a renewal never waits behind the calls of a thousand pools.
        self._lease_kube = KubeClient(connection, observer=self.metrics.observe_call)
        self.lease = LeaseKeeper(
            self._lease_kube, settings.lease, identity=settings.identity, clock=time.monotonic
        )
        self.reports = ReportCache(gateway, time.monotonic, mark=self._mark_known)
        self.prober = Prober(
            gateway,
            time.monotonic,
            on_answer=self._mark_pool,
            timeout_seconds=settings.probe_timeout_seconds,
        )
        self.resync = Resync(
            self.kube,
            self.store,
            namespaces=settings.namespaces,
            mark=self.mark,
            metrics=self.metrics,
            clock=time.monotonic,
            period_seconds=settings.resync_seconds,
            early_seconds=settings.early_resync_seconds,
        )
        self.scalers = ScalerWatcher(self.kube, time.monotonic, keep_seconds=2 * settings.scaling.interval)
        self.references = ReferenceChecker(self.kube, time.monotonic)
        self._node_kinds = NodeKinds(self.kube, time.monotonic, enabled=settings.is_cluster_wide)
        observer = self._make_observer()
        self.autoscaler = self._make_autoscaler(observer, gateway)
        self.manager = Manager(
            self._make_reconciler(observer, scaler or self.autoscaler).reconcile,
            metrics=self.metrics,
            may_write=self.lease.gained,
            is_synced=self.resync.synced,
            max_parallel=settings.max_parallel,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._servers: list[AdminServer] = []
        self.metrics_port = 0
        self.health_port = 0

    def _make_observer(self) -> Observer:
        return Observer(
            self.store,
            reports=self.reports,
            prober=self.prober,
            references=self.references,
            nodes=NodeWatcher(self.kube, time.monotonic, enabled=self.settings.is_cluster_wide),
            progress=FetchProgress(self.kube, time.monotonic),
            scalers=self.scalers,
            claims=ClaimWatcher(self.kube, time.monotonic, cluster_wide=self.settings.is_cluster_wide),
            node_kinds=self._node_kinds,
        )

    def _remember(self, kind: Kind, obj: Mapping[str, Any]) -> None:
        """Let the next decision see a write; Secrets are not watched, so not in the store."""
        if kind == SECRET:
            self.references.note_own(kind, obj)
        else:
            self.store.put(kind, obj)

    def _make_autoscaler(self, observer: Observer, engines: EngineCaller) -> Autoscaler:
        return Autoscaler(
            observer,
            reports=self.reports,
            engines=engines,
            scalers=self.scalers,
            node_kinds=self._node_kinds,
            metrics=self.metrics.scaling,
            list_pools=lambda: self.store.keys(POOL),
            count_changes=lambda: self.store.count_changes(POOL),
            mark=self.mark,
            is_leader=lambda: self.lease.is_leader and self.resync.synced.is_set(),
            settings=self.settings.scaling,
        )

    def _make_reconciler(self, observer: Observer, scaler: Scaler) -> Reconciler:
        fence, remember = self.lease.check, self._remember
        return Reconciler(
            observer=observer,
            executor=Executor(self.kube, fence=fence, remember=remember),
            status=StatusWriter(self.kube, fence=fence, remember=remember),
            events=EventWriter(self.kube, fence=fence, instance=self.settings.identity),
            settings=self.settings.plan,
            clock=time.time,
            monotonic=time.monotonic,
            scaler=scaler,
        )

    def mark(self, namespace: str, name: str) -> None:
        """Have one pool looked at."""
        self.manager.mark(namespace, name)

    def take_event(self, kind: Kind, event_type: str | None, obj: Obj) -> None:
        """Take what a watch (or its first list, type None) says about an object; mark its pool if that is news."""
        gone = event_type == "DELETED"
        news = self.store.remove(kind, obj) if gone else self.store.put(kind, obj)
        if news:
            mark_owner(self.store, kind, obj, self.mark)

    async def start(self) -> None:
        """Start everything that runs beside the watches."""
        await self._listen()
        runs = {
            "lease": self.lease.run(),
            "resync": self.resync.run(),
            "housekeeping": self._keep_house(),
            "scaling": self.autoscaler.run(),
        }
        self._tasks = [asyncio.create_task(run, name=name) for name, run in runs.items()]

    async def stop(self) -> None:
        """End in order: no new reconcile, then the Lease for the next instance, then the connections."""
        await self.manager.close()
        await self.prober.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.lease.release()
        for server in self._servers:
            await server.close()
        await self._lease_kube.close()
        await self.kube.close()

    def find_problem(self) -> str | None:
        """Why the process should be restarted, if it should."""
        for task in self._tasks:
            if task.done():
                return f"task {task.get_name()} has ended"
        age = self.resync.age_seconds
        limit = MISSED_RESYNCS * self.settings.resync_seconds
        if age is not None and age > limit:
            return f"no full list has succeeded for {age:.0f} seconds (limit {limit:.0f})"
        return None

    def find_unready(self) -> str | None:
        """Why the instance cannot take over yet, if so."""
        return None if self.resync.synced.is_set() else "the first full lists are not in"

    async def _listen(self) -> None:
        host = self.settings.listen_host
        health = {
            "/health": make_check_route(self.find_problem),
            "/ready": make_check_route(self.find_unready),
        }
        servers = (AdminServer({"/metrics": make_metrics_route(self.metrics.registry)}), AdminServer(health))
        self.metrics_port = await servers[0].start(host, self.settings.metrics_port)
        self.health_port = await servers[1].start(host, self.settings.health_port)
        self._servers = list(servers)

    async def _keep_house(self) -> None:
        """Refresh gauges and forget what belongs to pods that are gone."""
        while True:
            await asyncio.sleep(HOUSEKEEPING_SECONDS)
            self.refresh_gauges()
            living = {
                str(s.body["metadata"]["uid"])
                for key in self.store.keys(POD)
                if (s := self.store.get(POD, *key))
            }
            self.prober.forget_others(living)
            self.reports.forget_others(living)

    def refresh_gauges(self) -> None:
        """Set the gauges that no event keeps current."""
        self.metrics.leader.set(1 if self.lease.is_leader else 0)
        self.metrics.resync_age.set(self.resync.blind_seconds)
        pools = [stored for key in self.store.keys(POOL) if (stored := self.store.get(POOL, *key))]
        self.metrics.pools_ready.set(sum(1 for stored in pools if _is_ready(stored.body)))

    def _mark_known(self, namespace: str, name: str) -> None:
        """Mark a pool somebody else named, if there is one."""
        if self.store.get(POOL, namespace, name) is not None:
            self.mark(namespace, name)

    def _mark_pool(self, pool: tuple[str, str]) -> None:
        self.mark(*pool)


def _is_ready(pool: object) -> bool:
    assert isinstance(pool, dict)
    conditions = (pool.get("status") or {}).get("conditions") or ()
    return any(c["type"] == ConditionType.READY and c["status"] == "True" for c in conditions)
