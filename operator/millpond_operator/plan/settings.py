"""What the operator was told about planning."""

from __future__ import annotations

from dataclasses import dataclass

from millpond_operator.desired.settings import BuildSettings


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """Limits and periods of decisions."""

    build: BuildSettings
    history: int = 3
    """Earlier revisions whose record is kept."""
    surge_percent: int = 25
    """Of the desired count; at least one replica, never more than fit."""
    settled_recheck_seconds: float = 300.0
    """Of a pool that is as it should be: what changes marks it, this only corrects what was missed."""
    moving_recheck_seconds: float = 1.0
    """First look after a change; later ones are further apart while nothing happens."""
    draining_recheck_seconds: float = 5.0
    """While a replica leaves a pool that is settled otherwise, since status tells what is left on it."""
    unschedulable_patience_seconds: float = 30.0
    """How long a surge pod may wait for room (a node on its way) before old replicas make room for it."""
    delete_margin_seconds: float = 60.0
    """Beyond drain and grace: after it a deleted pool's finalizer goes whatever is left."""
