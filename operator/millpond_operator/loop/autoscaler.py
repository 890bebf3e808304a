"""The scaling loop: asks gateways and engines about every pool, has the count decided, and marks pools whose count moves.

One look per pool each interval, and each minute at a fixed pool that nobody uses. While a pool is at zero the gateways'
reports are read each second, one for all pools of a namespace, so that a held request wakes it at once. It writes nothing
itself: reconciles take the latest decision as they take the spec.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from millpond_common.contract.reasons import ConditionReason, ConditionType
from millpond_operator.api.errors import SpecError
from millpond_operator.api.pool import InferencePool, RoleView, list_roles
from millpond_operator.api.status import Judgement, PoolStatus, ScalingStatus, get_condition
from millpond_operator.clients.gateway import EngineCaller
from millpond_operator.errors import GatewayCallError
from millpond_operator.loop.due import DueTimes
from millpond_operator.loop.scaling_metrics import ScalingMetrics
from millpond_operator.loop.start_index import Model, StartIndex
from millpond_operator.observe.node_kinds import NodeKinds
from millpond_operator.observe.observer import Observer
from millpond_operator.observe.reports import ReportCache
from millpond_operator.observe.scalers import ScalerWatcher
from millpond_operator.plan.autoscale import Judged, ScalingView
from millpond_operator.plan.pace import choose_pause, find_next_look, is_called
from millpond_operator.plan.planner import Decisions
from millpond_operator.plan.publish import Published, publish
from millpond_operator.plan.scale import ReplicaDecision
from millpond_operator.plan.snapshot import Pod, PoolSnapshot
from millpond_operator.plan.split import judge_pool
from millpond_operator.scaling.aggregate import EngineSample, GatewaySample
from millpond_operator.scaling.memory import Memory, recall
from millpond_operator.scaling.starts import StartSummary

LOG = structlog.get_logger(__name__)
Key = tuple[str, str]
MAX_PARALLEL = 16
MAX_ENGINE_CALLS = 64
"""States fetched at a time, all pools together."""


@dataclass(frozen=True, slots=True)
class ScalingSettings:
    """Times of the loop, in seconds."""

    interval: float = 15.0
    wake_interval: float = 1.0
    """Between two reads of the reports about pools at zero."""
    rest_interval: float = 60.0
    """Between two looks at a pool whose count is fixed and that nobody uses."""


@dataclass(slots=True)
class _Kept:
    """What the loop holds of one pool; everything in it can be had again from the cluster."""

    key: Key
    memories: dict[str, Memory] = field(default_factory=dict)
    """By role."""
    gateways: dict[str, GatewaySample] = field(default_factory=dict)
    engines: dict[str, EngineSample] = field(default_factory=dict)
    published: dict[str, Published] = field(default_factory=dict)
    """By role."""
    generation: object = None
    """For which a look was asked last."""
    looked_at: float | None = None
    is_at_zero: bool = False
    """Whether the autoscaler holds it at zero, so that a request has to wake it."""
    is_running: bool = False


class Autoscaler:
    """Decides for every pool of this instance; it is the scaler of the reconciler."""

    def __init__(
        self,
        observer: Observer,
        *,
        reports: ReportCache,
        engines: EngineCaller,
        scalers: ScalerWatcher,
        node_kinds: NodeKinds,
        metrics: ScalingMetrics,
        list_pools: Callable[[], Iterable[Key]],
        count_changes: Callable[[], int],
        mark: Callable[[str, str], None],
        is_leader: Callable[[], bool],
        settings: ScalingSettings,
    ) -> None:
        self._observer = observer
        self._reports = reports
        self._engines = engines
        self._scalers = scalers
        self._node_kinds = node_kinds
        self._metrics = metrics
        self._list_pools = list_pools
        self._count_changes = count_changes
        self._mark = mark
        self._is_leader = is_leader
        self._settings = settings
        self._kept: dict[str, _Kept] = {}
        self._due = DueTimes()
        self._starts = StartIndex()
        self._changes_seen: int | None = None
        self._slots = asyncio.Semaphore(MAX_PARALLEL)
        self._calls = asyncio.Semaphore(MAX_ENGINE_CALLS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening: set[str] = set()
        """Namespaces whose gateways are being asked whether somebody wants a pool at zero."""
        self._listened_at = 0.0

    # --- what a reconcile asks ----------------------------------------------------------------------------------------

    def decide(self, snapshot: PoolSnapshot, now: float) -> Decisions:
        """The latest decision inside today's limits; until there is one, what the status showed last stays."""
        pool = snapshot.pool
        kept = self._kept.get(pool.metadata.uid)
        decisions: dict[str, ReplicaDecision] = {}
        for role in list_roles(pool):
            if role.scaling is None:
                continue
            shown = kept.published.get(role.role) if kept is not None else None
            made = shown.decision if shown is not None else _repeat(pool.status, role)
            if made is not None:
                low, high = role.scaling.min_replicas, role.scaling.max_replicas
                decisions[role.role] = replace(made, replicas=min(high, max(low, made.replicas)))
        return decisions

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Look at pools until cancelled."""
        try:
            while True:
                await asyncio.sleep(min(self._settings.wake_interval, self._settings.interval) / 2)
                if self._is_leader():
                    self._tick(time.time())
                else:
                    self._forget(set())
                    self._changes_seen = None
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _tick(self, now: float) -> None:
        changes = self._count_changes()
        if changes != self._changes_seen:
            self._changes_seen = changes
            self._take_stock(now)
        for uid in self._due.pop(now):
            kept = self._kept[uid]
            if kept.is_running:
                self._due.set(uid, now + self._settings.wake_interval / 2)
            else:
                kept.is_running = True
                self._spawn(self._run_one(uid, kept), f"scaling {kept.key[0]}/{kept.key[1]}")
        if now - self._listened_at >= self._settings.wake_interval:
            self._listened_at = now
            self._listen()

    def _take_stock(self, now: float) -> None:
        """Have new and changed pools looked at now; forget those that are gone."""
        living: set[str] = set()
        for key in self._list_pools():
            raw = self._observer.get_raw(*key)
            if raw is None:
                continue
            uid, generation = str(raw["metadata"]["uid"]), raw["metadata"].get("generation")
            living.add(uid)
            kept = self._kept.setdefault(uid, _Kept(key))
            if kept.generation != generation:
                kept.generation = generation
                self._due.set(uid, now)
        self._forget(living)

    def _forget(self, living: set[str]) -> None:
        for uid in [uid for uid in self._kept if uid not in living]:
            self._metrics.forget(self._kept.pop(uid).key)
            self._due.forget(uid)
            self._starts.forget(uid)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_one(self, uid: str, kept: _Kept) -> None:
        pause = self._settings.interval
        try:
            async with self._slots:
                pause = await self._look(uid, kept)
        except SpecError:
            LOG.debug("not scaled: its reconcile reports why", namespace=kept.key[0], pool=kept.key[1])
        except Exception:
            # One pool's bug must not stop the scaling of the others.
            LOG.exception("scaling failed", namespace=kept.key[0], pool=kept.key[1])
        finally:
            kept.is_running = False
        if self._kept.get(uid) is kept:
            interval = self._settings.interval
            self._due.set(uid, find_next_look(time.time(), pause, namespace=kept.key[0], interval=interval))

    # --- pools at zero ------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Ask the gateways of every namespace with a pool at zero, once for all its pools."""
        waiting: dict[str, list[tuple[str, _Kept]]] = {}
        for uid, kept in self._kept.items():
            if kept.is_at_zero:
                waiting.setdefault(kept.key[0], []).append((uid, kept))
        for namespace, pools in waiting.items():
            if namespace not in self._listening:
                self._listening.add(namespace)
                self._spawn(self._listen_in(namespace, pools), f"listening {namespace}")

    async def _listen_in(self, namespace: str, pools: list[tuple[str, _Kept]]) -> None:
        pause = self._settings.wake_interval
        try:
            gateways = self._observer.list_gateway_pods(namespace)
            reports = await self._reports.fetch_reports(namespace, gateways, max_age=pause / 2)
        finally:
            self._listening.discard(namespace)
        now = time.time()
        for uid, kept in pools:
            # The look before may have gone by a report that was a little older than itself.
            since = now - (kept.looked_at or 0.0) + pause
            found = [entry.pools[kept.key[1]] for entry in reports if kept.key[1] in entry.pools]
            if uid in self._kept and any(is_called(report, since_seconds=since) for report in found):
                self._due.set(uid, now)

    async def _look(self, uid: str, kept: _Kept) -> float:
        """Look at one pool; returns the seconds until the next look."""
        key, settings, started = kept.key, self._settings, time.time()
        snapshot = self._observer.look(*key, started)
        if snapshot is None or snapshot.pool.is_deleting:
            kept.is_at_zero = False
            return settings.interval
        pool = snapshot.pool
        if kept.looked_at is None and pool.status.scaling is not None:
            kept.memories = {"Both": _recall(pool.status.scaling)}
        kept.looked_at = started
        view = await self._fetch(uid, kept, pool, snapshot.pods)
        if self._kept.get(uid) is not kept:
            return settings.interval  # gone, or another instance leads: what it says is no longer asked
        await self._find_rivals(key)
        now = time.time()
        # The count may have moved while the answers came.
        snapshot = self._observer.look(*key, now) or snapshot
        judged = judge_pool(snapshot, view, kept.memories, now)
        kept.memories = {name: found.memory for name, found in judged.items()}
        starts = tuple(start for memory in kept.memories.values() for start in memory.starts)
        self._starts.put(uid, _find_model(pool), starts)
        for role in list_roles(snapshot.pool):
            if role.role == "Both":
                self._metrics.show(key, judged[role.role], decides=role.scaling is not None)
            self._publish(kept, role, judged[role.role], key, now)
        decides = any(role.scaling is not None for role in list_roles(snapshot.pool))
        kept.is_at_zero = decides and all(found.decision.replicas == 0 for found in judged.values())
        return choose_pause(snapshot, view, interval=settings.interval, rest_interval=settings.rest_interval)

    async def _find_rivals(self, key: Key) -> None:
        """See whether an HPA came or went: the conditions name it."""
        before = self._scalers.get_names(*key)
        await self._scalers.refresh(key[0])
        if self._scalers.get_names(*key) != before:
            self._mark(*key)

    def _publish(self, kept: _Kept, role: RoleView, judged: Judged, key: Key, now: float) -> None:
        before = kept.published.get(role.role)
        shown = kept.published[role.role] = publish(judged, before, now)
        if role.scaling is None or (before is not None and before.at == shown.at):
            return
        if before is None or before.decision.replicas != shown.decision.replicas:
            decision = shown.decision.message
            LOG.info("scaling", namespace=key[0], pool=key[1], role=role.role, decision=decision)
        self._mark(*key)

    # --- asking -------------------------------------------------------------------------------------------------------

    async def _fetch(self, uid: str, kept: _Kept, pool: InferencePool, pods: tuple[Pod, ...]) -> ScalingView:
        """Ask everybody; an answer that fails to come is replaced by the last one while that is fresh enough."""
        namespace, name = pool.key
        gateways = self._observer.list_gateway_pods(namespace) if pool.spec.gateway.enabled else []
        ready = [pod for pod in pods if pod.serving and pod.address]
        max_age = min(self._settings.wake_interval if not ready else self._settings.interval, 2.0) / 2
        reports, errors = await asyncio.gather(
            self._reports.fetch_reports(namespace, gateways, max_age=max_age),
            asyncio.gather(*(self._fetch_state(kept, pod) for pod in ready)),
        )
        await self._node_kinds.refresh({pod.node for pod in pods if pod.node})
        now, clock = time.time(), time.monotonic()
        for entry in reports:
            found = entry.pools.get(name)
            if entry.report is not None and found is not None:
                at = now - (clock - entry.at)
                kept.gateways[entry.pod_uid] = GatewaySample(
                    f"{entry.pod_uid}/{entry.report.epoch}", at, found
                )
        oldest = now - 2 * self._settings.interval
        known = {entry.pod_uid for entry in reports}
        kept.gateways = {u: s for u, s in kept.gateways.items() if u in known and s.at >= oldest}
        living = {pod.uid for pod in ready}
        kept.engines = {u: s for u, s in kept.engines.items() if u in living and s.at >= oldest}
        problems = [entry.error for entry in reports if entry.error] + [text for text in errors if text]
        return ScalingView(
            gateways=tuple(kept.gateways.values()),
            num_gateways=len(reports),
            num_silent=sum(1 for entry in reports if entry.error),
            engines=tuple(kept.engines.values()),
            error=problems[0] if problems else "",
            interval_seconds=self._settings.interval,
            node_kinds=self._node_kinds.get(),
            zones=self._node_kinds.get_zones(),
            other_starts=self._starts.list_others(uid, _find_model(pool)),
        )

    async def _fetch_state(self, kept: _Kept, pod: Pod) -> str:
        """Fetch one state; returns the error, empty when it came."""
        async with self._calls:
            at = time.time()
            try:
                state = await self._engines.fetch_state(pod.address)
            except GatewayCallError as error:
                return str(error)
        kept.engines[pod.uid] = EngineSample(pod.uid, at, state)
        return ""


def _find_model(pool: InferencePool) -> Model:
    return pool.spec.model.source, pool.model_revision, pool.spec.engine.tensor_parallel_size


def _recall(shown: ScalingStatus) -> Memory:
    """What an earlier instance left; releases before start times by kind of node left one number."""
    starts = tuple(StartSummary(s.node_kind, float(s.seconds), s.num_starts) for s in shown.start_times)
    if not starts and shown.start_seconds is not None:
        starts = (StartSummary("", float(shown.start_seconds), 1),)
    return recall(capacity=shown.capacity_tokens_per_second, starts=starts)


def _repeat(status: PoolStatus, role: RoleView) -> ReplicaDecision | None:
    """The decision an earlier instance left in the status, so that a restart changes nothing before data is in.

    Of a split pool the status shows no decision by role; its counts are held as the Deployments have them.
    """
    if role.role != "Both":
        return None
    kinds = (ConditionType.SCALING_ACTIVE, ConditionType.SCALING_LIMITED)
    shown = [condition for kind in kinds if (condition := get_condition(status, kind)) is not None]
    if status.scaling is None or status.desired_replicas is None or len(shown) != len(kinds):
        return None
    words = {"True": True, "False": False, "Unknown": None}
    try:
        judgements = tuple(
            Judgement(ConditionType(c.type), words[c.status], ConditionReason(c.reason), c.message)
            for c in shown
        )
    except ValueError:
        return None  # a reason of another release
    return ReplicaDecision(status.desired_replicas, judgements, status.scaling)
