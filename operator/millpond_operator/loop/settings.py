"""Everything the operator process was told."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from millpond_common.contract import ports
from millpond_operator.loop.autoscaler import ScalingSettings
from millpond_operator.loop.lease import LeaseSettings
from millpond_operator.loop.resync import EARLY_SECONDS
from millpond_operator.plan.settings import PlanSettings


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    """One operator instance."""

    plan: PlanSettings
    lease: LeaseSettings
    identity: str
    namespaces: tuple[str, ...] = ()
    """Namespaces it serves; empty means the whole cluster."""
    kubeconfig: Path | None = None
    context: str | None = None
    resync_seconds: float = 300.0
    early_resync_seconds: tuple[float, ...] = EARLY_SECONDS
    """Pauses before the first full lists after the start."""
    watch_inactivity_seconds: float = 70.0
    """A watch without any event or bookmark for this long is taken for dead; the API server sends one a minute."""
    max_parallel: int = 16
    probe_timeout_seconds: float = 30.0
    scaling: ScalingSettings = field(default_factory=ScalingSettings)
    listen_host: str = "0.0.0.0"  # noqa: S104 - probes and scrapes come from outside the pod
    metrics_port: int = ports.OPERATOR_METRICS
    health_port: int = ports.OPERATOR_HEALTH

    @property
    def is_cluster_wide(self) -> bool:
        """Whether it serves every namespace."""
        return not self.namespaces
