"""What the scheduler may spend (Capacity) and how it decides (SchedulerSettings)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from millpond_common.contract.engine_config import SchedulingConfig

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


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the loaded model and its memory allow."""

    num_blocks: int
    block_tokens: int
    max_model_tokens: int
    num_host_blocks: int = 0
    bytes_per_block: int = 0
    copy_bytes_per_second: float = 0.0
    """Measured device to host bandwidth; 0: swapping is never chosen by cost."""
    eos_token_ids: tuple[int, ...] = ()
    vocabulary_size: int = 1 << 32


class RunnerFacts(Protocol):
    """The numbers of the runner that bound the scheduler; RunnerInfo has them."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def max_model_tokens(self) -> int: ...
    @property
    def num_host_blocks(self) -> int: ...
    @property
    def bytes_per_block(self) -> int: ...
    @property
    def copy_bytes_per_second(self) -> float: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def vocabulary_size(self) -> int: ...


def make_capacity(facts: RunnerFacts) -> Capacity:
    """Take over the numbers of a loaded runner."""
    return Capacity(
        num_blocks=facts.num_blocks,
        block_tokens=facts.block_tokens,
        max_model_tokens=facts.max_model_tokens,
        num_host_blocks=facts.num_host_blocks,
        bytes_per_block=facts.bytes_per_block,
        copy_bytes_per_second=facts.copy_bytes_per_second,
        eos_token_ids=facts.eos_token_ids,
        vocabulary_size=facts.vocabulary_size,
    )


def make_settings(
    config: SchedulingConfig, *, base_seed: int = 0, cache_events: bool = True
) -> SchedulerSettings:
    """Translate the configuration file's section; `base_seed` should differ between engine starts."""
    classes = tuple(
        ClassRule(
            name=item.name,
            priority=item.priority,
            ttft_seconds=None if item.ttft_milliseconds is None else item.ttft_milliseconds / 1000,
            reserved_percent=item.reserved_kv_percent,
            max_share_percent=item.max_share_percent,
            gate_class=item.admit_while_queued_class,
            gate_below=item.admit_while_queued_below or 0,
        )
        for item in config.classes
    )
    tenants = tuple(
        TenantRule(item.name, item.weight, item.max_concurrency, item.max_cache_percent)
        for item in config.tenants
    )
    return SchedulerSettings(
        max_batch_tokens=config.max_batch_tokens,
        max_sequences=config.max_sequences,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        policy=config.policy,
        preemption=config.preemption,
        classes=classes,
        default_class=config.default_class,
        tenants=tenants,
        base_seed=base_seed,
        cache_events=cache_events,
    )
