"""What the engine thread publishes for everyone else: one frozen record, replaced whole."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from millpond_engine.engine.runner import RunnerInfo
from millpond_engine.records.outputs import SchedulerCounts


class LoopPhase(StrEnum):
    """Life of the engine thread."""

    LOADING = "Loading"
    READY = "Ready"
    PAUSED = "Paused"
    ASLEEP = "Asleep"
    FAILED = "Failed"
    STOPPED = "Stopped"


EMPTY_COUNTS = SchedulerCounts(
    free_blocks=0,
    cached_blocks=0,
    used_blocks=0,
    free_host_blocks=0,
    used_host_blocks=0,
    num_running=0,
    num_waiting=0,
    running_tokens=0,
    waiting_tokens=0,
)


@dataclass(frozen=True, slots=True)
class LoopSnapshot:
    """The loop at one instant."""

    at: float
    phase: LoopPhase
    counts: SchedulerCounts = EMPTY_COUNTS
    info: RunnerInfo | None = None
    prefill_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    decode_seconds_per_step: float | None = None
    load_seconds: float | None = None
    ready_at: float | None = None
    charged_seconds: float = 0.0
    """Device time charged to requests so far."""
    num_open: int = 0
    """Submitted requests whose handler has not closed them."""
    num_steps: int = 0
    failure: str = ""


@dataclass(frozen=True, slots=True)
class LoopHealth:
    """Whether the loop still does its work."""

    healthy: bool
    message: str
