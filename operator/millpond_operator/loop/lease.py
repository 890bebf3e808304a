"""Leadership by a Lease: one instance writes, the others watch and wait.

The rules of Kubernetes' own leader election: a lease counts as lost when it was not renewed for `deadline` seconds of
this instance's clock, and as free when its record did not change for `duration` seconds of the same clock. Clocks
of different machines are never compared.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import structlog

from millpond_common.contract.labels import MANAGER
from millpond_operator.clients.kube import KubeClient
from millpond_operator.desired.kinds import LEASE
from millpond_operator.errors import ConflictError, KubeError, NotFoundError, NotLeaderError

LOG = structlog.get_logger(__name__)
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class LeaseSettings:
    """Times of the election, in seconds."""

    namespace: str
    name: str = "millpond-operator"
    duration: float = 15.0
    deadline: float = 10.0
    period: float = 2.0


class LeaseKeeper:
    """Holds the Lease, or waits for it."""

    def __init__(self, kube: KubeClient, settings: LeaseSettings, *, identity: str, clock: Clock) -> None:
        self._kube = kube
        self._settings = settings
        self.identity = identity
        self._clock = clock
        self._renewed_at: float | None = None
        self._seen: tuple[str, str] | None = None
        """Holder and renewal time of the record that was seen last."""
        self._seen_at = 0.0
        self._missing_since: float | None = None
        self.holder = ""
        self.gained = asyncio.Event()

    @property
    def is_leader(self) -> bool:
        """Whether this instance may write now."""
        renewed = self._renewed_at
        return renewed is not None and self._clock() - renewed < self._settings.deadline

    def check(self) -> None:
        """Guard of every write.

        Raises:
            NotLeaderError: the Lease is another's, or was not renewed in time.
        """
        if not self.is_leader:
            self.gained.clear()
            raise NotLeaderError(
                f"{self.identity} does not hold the Lease {self._settings.name}: nothing is written"
            )

    async def run(self) -> None:
        """Acquire and renew until cancelled."""
        while True:
            led = self.is_leader
            try:
                async with asyncio.timeout(self._settings.deadline / 2):
                    await self._step()
            except (KubeError, TimeoutError) as error:
                LOG.warning("lease not renewed", error=str(error) or type(error).__name__)
            self._note_change(led)
            await asyncio.sleep(self._settings.period)

    async def release(self) -> None:
        """Give the Lease up, so that the next instance need not wait for it to run out."""
        if not self.is_leader:
            return
        self._renewed_at = None
        self.gained.clear()
        settings = self._settings
        with contextlib.suppress(KubeError):
            lease = await self._kube.get(LEASE, settings.namespace, settings.name)
            if lease["spec"].get("holderIdentity") == self.identity:
                lease["spec"] = {**lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}
                await self._kube.replace(LEASE, settings.namespace, settings.name, lease)

    def _note_change(self, led: bool) -> None:
        if self.is_leader:
            self.gained.set()
        else:
            self.gained.clear()
        if self.is_leader != led:
            LOG.info("leadership changed", leader=self.is_leader, holder=self.holder, identity=self.identity)

    async def _step(self) -> None:
        settings, started = self._settings, self._clock()
        try:
            lease = await self._kube.get(LEASE, settings.namespace, settings.name)
        except NotFoundError:
            lease = None
        if not (self._may_create() if lease is None else self._may_take(lease)):
            self._renewed_at = None
            return
        try:
            if lease is None:
                await self._kube.create(LEASE, settings.namespace, self._make({}), manager=MANAGER)
            else:
                await self._kube.replace(LEASE, settings.namespace, settings.name, self._make(lease))
        except ConflictError:
            # Another instance wrote first; what was renewed before still runs out by itself.
            return
        self.holder = self.identity
        self._renewed_at = started
        self._seen = self._seen or (self.identity, "")

    def _may_create(self) -> bool:
        """A Lease that was there went with its release: an instance about to be stopped must not bring it back.

        Deleted by hand it comes again after `duration`, when no earlier holder can still take itself for one.
        """
        if self._seen is None:
            return True
        if self._missing_since is None:
            self._missing_since = self._clock()
        return self._clock() - self._missing_since >= self._settings.duration

    def _may_take(self, lease: dict[str, Any]) -> bool:
        self._missing_since = None
        spec = lease.get("spec") or {}
        self.holder = str(spec.get("holderIdentity") or "")
        record = (self.holder, str(spec.get("renewTime") or ""))
        if record != self._seen:
            self._seen, self._seen_at = record, self._clock()
        if self.holder in ("", self.identity):
            return True
        duration = float(spec.get("leaseDurationSeconds") or self._settings.duration)
        return self._clock() - self._seen_at >= duration

    def _make(self, lease: dict[str, Any]) -> dict[str, Any]:
        settings, spec = self._settings, lease.get("spec") or {}
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        same = spec.get("holderIdentity") == self.identity
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.name,
            "metadata": lease.get("metadata") or {"name": settings.name, "namespace": settings.namespace},
            "spec": {
                "holderIdentity": self.identity,
                "leaseDurationSeconds": int(settings.duration),
                "acquireTime": spec.get("acquireTime") if same else now,
                "renewTime": now,
                "leaseTransitions": int(spec.get("leaseTransitions") or 0) + (0 if same else 1),
            },
        }
