"""One reconcile: observe, plan, execute, status, events; in this order, from the world as it is now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import structlog

from millpond_operator.api.errors import SpecError
from millpond_operator.api.pool import PoolMetadata
from millpond_operator.api.status import PoolStatus
from millpond_operator.errors import ForbiddenError, InvalidObjectError, KubeError
from millpond_operator.execute.events import EventWriter
from millpond_operator.execute.executor import Executor
from millpond_operator.execute.status import StatusWriter
from millpond_operator.loop.status_pace import StatusPace
from millpond_operator.observe.observer import Observer
from millpond_operator.plan.actions import EventNote, PoolPlan
from millpond_operator.plan.planner import Decisions, plan, plan_invalid
from millpond_operator.plan.refusal import report_refusal
from millpond_operator.plan.settings import PlanSettings
from millpond_operator.plan.snapshot import PoolSnapshot

LOG = structlog.get_logger(__name__)
WallClock = Callable[[], float]
LASTING_REFUSALS = (ForbiddenError, InvalidObjectError)
"""Answers that no repetition changes until somebody acts; others pass by themselves and are only retried."""
MAX_ROUNDS = 2
"""Plans per reconcile: the second follows when a write met an object of somebody else."""


class Scaler(Protocol):
    """Where the autoscaler plugs in: called with each snapshot, before the plan."""

    def decide(self, snapshot: PoolSnapshot, now: float) -> Decisions:
        """Replica decisions by role; an absent role is held or fixed."""
        ...


class NoScaler:
    """Decides nothing, so that pools with scaling hold their count and say so."""

    def decide(self, snapshot: PoolSnapshot, now: float) -> Decisions:
        """No decision for any role."""
        return {}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one round leads to."""

    recheck_seconds: float
    wrote: bool
    """Whether anything was written or waits to be, so that something follows soon."""


class Reconciler:
    """Brings one pool a step closer to its spec each time it is called."""

    def __init__(
        self,
        *,
        observer: Observer,
        executor: Executor,
        status: StatusWriter,
        events: EventWriter,
        settings: PlanSettings,
        clock: WallClock,
        monotonic: Callable[[], float],
        scaler: Scaler | None = None,
    ) -> None:
        self._observer = observer
        self._executor = executor
        self._status = status
        self._events = events
        self._settings = settings
        self._clock = clock
        self._monotonic = monotonic
        self._pace = StatusPace(monotonic)
        self._scaler = scaler or NoScaler()

    async def reconcile(self, namespace: str, name: str) -> Outcome | None:
        """Do one round; None when the pool is gone.

        Raises:
            KubeError: a call was refused; try again later.
            NotLeaderError: another instance leads.
        """
        for _ in range(MAX_ROUNDS):
            now = self._clock()
            raw = self._observer.get_raw(namespace, name)
            if raw is None:
                return None
            made = await self._decide(namespace, name, now)
            if made is None:
                return None
            metadata, decided = made
            try:
                stranger = await self._executor.run(metadata, decided.actions)
            except LASTING_REFUSALS as error:
                await self._report_refusal(metadata, _read_status(raw), str(error), now)
                raise
            if not stranger:
                break
        wait = self._find_wait(metadata, decided)
        if wait > 0:
            return Outcome(min(wait, decided.recheck_seconds), wrote=True)
        await self._report(metadata, decided, now)
        wrote = bool(decided.actions or decided.status is not None)
        return Outcome(0.0 if decided.actions else decided.recheck_seconds, wrote=wrote)

    def _find_wait(self, metadata: PoolMetadata, decided: PoolPlan) -> float:
        """Seconds for which the status is held back, and the events with it; the next round finds both anew."""
        if decided.status is None or decided.urgent:
            return 0.0
        return self._pace.get_wait(metadata.uid)

    async def _decide(self, namespace: str, name: str, now: float) -> tuple[PoolMetadata, PoolPlan] | None:
        raw = self._observer.get_raw(namespace, name)
        if raw is None:
            return None
        try:
            snapshot = await self._observer.observe(namespace, name, now)
        except SpecError as error:
            metadata = msgspec.convert(raw["metadata"], PoolMetadata)
            return metadata, plan_invalid(metadata, _read_status(raw), str(error), now)
        if snapshot is None:
            return None
        decisions = self._scaler.decide(snapshot, now)
        return snapshot.pool.metadata, plan(snapshot, self._settings, now, decisions)

    async def _report_refusal(
        self, metadata: PoolMetadata, before: PoolStatus, problem: str, now: float
    ) -> None:
        status, note = report_refusal(before, problem, generation=metadata.generation, now=now)
        if status is not None:
            await self._status.write(metadata, status)
        if note is not None:
            await self._post(metadata, note, now)

    async def _report(self, metadata: PoolMetadata, decided: PoolPlan, now: float) -> None:
        for action in decided.actions:
            LOG.info("wrote", namespace=metadata.namespace, pool=metadata.name, action=repr_action(action))
        if (
            decided.status is not None
            and self._observer.get_raw(metadata.namespace, metadata.name) is not None
        ):
            started = self._monotonic()
            await self._status.write(metadata, decided.status)
            self._pace.note(metadata.uid, seconds=self._monotonic() - started)
        for note in decided.events:
            LOG.info(
                "event",
                namespace=metadata.namespace,
                pool=metadata.name,
                reason=note.reason,
                message=note.message,
            )
            await self._post(metadata, note, now)

    async def _post(self, metadata: PoolMetadata, note: EventNote, now: float) -> None:
        """Post an event. One that is refused (no right, a namespace on its way out) is lost: the status says it too."""
        try:
            await self._events.write(metadata, note, now)
        except KubeError as error:
            LOG.warning("event lost", namespace=metadata.namespace, pool=metadata.name, error=str(error))


def _read_status(raw: Mapping[str, Any]) -> PoolStatus:
    try:
        return msgspec.convert(raw.get("status") or {}, PoolStatus)
    except msgspec.ValidationError:
        return PoolStatus()


def repr_action(action: object) -> str:
    """One action in a few words, without the bodies of objects."""
    manifest = getattr(action, "manifest", None)
    name = getattr(action, "name", "")
    target = f"{manifest.kind.name} {manifest.name}" if manifest is not None else name
    return f"{type(action).__name__} {target}".strip()
