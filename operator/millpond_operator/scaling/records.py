"""What a scaling decision looks at and what it returns: frozen records, times in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from millpond_common.contract.reasons import ScalingReason

UTILISATION = 0.8
"""Share of a replica's capacity that demand may use: the rest absorbs bursts shorter than a loop."""
TOLERANCE = 0.1
"""Relative change of the count that is not worth a start or a drain."""


Axes = Literal["Both", "Prefill", "Decode"]
"""Which demand a role follows: prompt tokens, output tokens and KV residency, or all of them."""


@dataclass(frozen=True, slots=True)
class ScalingLimits:
    """What the user asked for."""

    min_replicas: int
    max_replicas: int
    queued_tokens: int | None = None
    """Target of uncached tokens waiting per replica."""
    kv_percent: int | None = None
    ttft_milliseconds: int | None = None
    stabilization_seconds: float = 300.0
    idle_seconds: float | None = None
    """With min_replicas 0: scale to zero after this long without demand."""


@dataclass(frozen=True, slots=True)
class Supply:
    """Replicas by what they can do now."""

    ready: int
    pending_ages: tuple[float, ...] = ()
    """Seconds since creation of each replica that is not ready yet."""
    draining: int = 0

    @property
    def wanted(self) -> int:
        """The count as it stands: draining replicas are on their way out and do not count."""
        return self.ready + len(self.pending_ages)

    def count_suspect(self, horizon_seconds: float) -> int:
        """Pending replicas older than twice the measured start time: no longer supply."""
        return sum(age > 2 * horizon_seconds for age in self.pending_ages)


@dataclass(frozen=True, slots=True)
class Demand:
    """What arrives at all gateways of the pool together. A rate is None while its window is not full."""

    observed_at: float
    gateways_reporting: int
    gateways_expected: int
    uncached_per_second_15: float | None
    uncached_per_second_60: float | None
    output_per_second: float | None
    held_tokens: int
    queued_tokens: int
    held_requests: int = 0
    ttft_milliseconds: float | None = None
    """p90 of the worst class against its target; None without requests."""
    idle_seconds: float | None = None
    """Since the last request at any gateway; None when a gateway cannot say."""
    last_request_seconds: float | None = None
    """Since the last request that some gateway saw; None while none saw any since its start."""

    @property
    def backlog_tokens(self) -> int:
        """Uncached tokens waiting anywhere."""
        return self.held_tokens + self.queued_tokens


@dataclass(frozen=True, slots=True)
class KvLoad:
    """KV blocks that live sequences hold, over the replicas that reported."""

    observed_at: float
    used_blocks: int
    blocks_per_replica: int
    replicas_reporting: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one replica sustains at its targets; None while unmeasured."""

    prefill_per_second: float | None = None
    decode_per_second: float | None = None
    reachable_ttft_milliseconds: float | None = None
    """Best p90 TTFT seen on a nearly idle fleet: no count of replicas beats it."""


@dataclass(frozen=True, slots=True)
class Recommended:
    """Floor of one earlier decision, for the stabilization window."""

    at: float
    replicas: int


@dataclass(frozen=True, slots=True)
class ScalingSnapshot:
    """Everything a decision may use."""

    limits: ScalingLimits
    supply: Supply
    demand: Demand | None
    kv: KvLoad | None
    capacity: Capacity
    horizon_seconds: float
    """p90 of measured create-to-ready time for this model and node kind."""
    axes: Axes = "Both"
    history: tuple[Recommended, ...] = ()
    """Oldest first; a gap longer than the window counts as no history."""
    stale_after_seconds: float = 30.0
    warm_floor: int = 0
    """Replicas for bursts that are shorter than a start."""
    victim_reuse_per_second: tuple[float, ...] = ()
    """Prompt tokens per second that hit blocks only this replica holds, in the order in which replicas would leave:
    demand once it is gone. Empty where nobody measured it."""


@dataclass(frozen=True, slots=True)
class Need:
    """Replicas one axis asks for, fractional."""

    replicas: float
    reason: ScalingReason


@dataclass(frozen=True, slots=True)
class Decision:
    """The count, how it came about, and the numbers behind it."""

    replicas: int
    recommendation: int
    """Before history, rates and limits."""
    reason: ScalingReason
    """What decided."""
    bounds: tuple[ScalingReason, ...] = ()
    """Every rule that bound the result, in order of application."""
    floor: int = 0
    """Smallest fleet that would carry this demand with margin: what the stabilization window remembers."""
    message: str = ""
    demand_per_second: float | None = None
    capacity_per_second: float | None = None
    needs: tuple[Need, ...] = field(default=())
