"""How the scheduler decides: rules of classes and tenants, policies, limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PolicyName = Literal["FairShare", "Fifo", "Priority", "Deadline", "LongestPrefix"]
"""The configurable policies and LongestPrefix, which orders a class by cached prompt tokens."""
PreemptionName = Literal["Auto", "Swap", "Recompute", "Reject"]


@dataclass(frozen=True, slots=True)
class ClassRule:
    """What one traffic class may have."""

    name: str
    priority: int = 0
    """Higher runs first and may preempt lower, except under Fifo."""
    ttft_seconds: float | None = None
    """Deadline of the first token for requests that name none."""
    reserved_percent: int = 0
    """Share of all blocks that other classes leave free."""
    max_share_percent: int = 100
    gate_class: str | None = None
    """Admit only while fewer than `gate_below` requests of that class wait."""
    gate_below: int = 0


@dataclass(frozen=True, slots=True)
class TenantRule:
    """What one tenant may have."""

    name: str
    weight: int = 1
    max_concurrency: int | None = None
    """Requests in the batch at once; more wait."""
    max_cache_percent: int = 100
    """Cached blocks beyond this share of the pool are evicted first."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """How the scheduler decides. The defaults are those of the configuration file."""

    max_batch_tokens: int = 2048
    max_sequences: int = 256
    """Rows of the runner: row numbers are 0 .. max_sequences - 1."""
    max_queued_requests: int = 1024
    max_queued_tokens: int = 4_000_000
    policy: PolicyName = "FairShare"
    preemption: PreemptionName = "Auto"
    classes: tuple[ClassRule, ...] = ()
    default_class: str = "interactive"
    """Rules for requests of classes nobody declared."""
    tenants: tuple[TenantRule, ...] = ()
    prefix_cache: bool = True
    cache_events: bool = True
    """Collect BlocksStored and BlocksRemoved for a publisher."""
    admission_percent: int = 25
    """Slice of the budget for prompts behind the oldest unfinished one."""
    max_bypasses: int = 16
    """How often a request that does not fit is passed before the queue waits for it."""
    max_candidates: int = 64
    """Waiting requests looked at in one step."""
    max_prefix_sorted: int = 128
    """Longest queue that LongestPrefix still sorts; beyond it arrival order is cheaper and fair."""
    watermark_percent: int = 1
    """Blocks left free at admission while others run."""
    max_preemptions: int = 3
    """Per request; after that it is admitted with its whole length reserved and left alone."""
    max_boosts: int = 2
    """Preemptions after which a request no longer goes ahead of those that never ran."""
    starvation_seconds: float = 10.0
    """Under Deadline, a request waits at most this long behind later arrivals of its class."""
    base_seed: int = 0
    """Start of the seeds drawn for sequences whose request names none."""
