"""Bounds of the loop, and what it expects of its surroundings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from millpond_engine.records.outputs import CacheEvent


class LoadCancelledError(RuntimeError):
    """Loading was given up because the process is asked to end."""


class EventSink(Protocol):
    """Where cache events go; must not block."""

    def publish(self, events: tuple[CacheEvent, ...]) -> None:
        """Take the events of one step."""
        ...

    @property
    def sequence(self) -> int:
        """Number of the newest batch."""
        ...


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """Bounds of the loop."""

    max_open_requests: int = 2048
    stuck_seconds: float = 60.0
    """A step that takes longer makes /health fail."""
    idle_wait_seconds: float = 0.25
    publish_seconds: float = 0.02
    """Shortest time between two snapshots while busy."""
    no_progress_wait_seconds: float = 0.002
    """Pause after a step that found nothing to do though requests wait."""
