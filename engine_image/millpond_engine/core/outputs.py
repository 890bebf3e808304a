"""What the scheduler reports after a step: tokens for clients, cache events, and what it decided, with reasons."""

from __future__ import annotations

from dataclasses import dataclass, field

from millpond_engine.core.request import FinishReason, PreemptionMode, Refusal
from millpond_engine.core.step import TokenLogprobs


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """News of one sequence of a request. Every accepted token is reported once, in order."""

    request_id: str
    index: int
    """Choice index, 0 .. n-1. Beam search and best_of report all their tokens at the end."""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token when asked for."""
    finish: FinishReason | None = None
    stop_token: int | None = None
    """The token that ended the sequence, when one did; it is not part of `tokens`."""
    score: float | None = None


@dataclass(frozen=True, slots=True)
class PromptOutput:
    """A request's prompt is computed: reported once, before or with its first token."""

    request_id: str
    cached_tokens: int
    """Prompt tokens taken from the prefix cache, counted when blocks were granted."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """For prompt positions 1 .., when asked for."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Full blocks that became findable by prefix, parents before children."""

    block_ids: tuple[int, ...]
    parent_block_id: int | None
    tokens: tuple[int, ...]
    namespace: tuple[str, ...]
    prefix_tokens: tuple[int, ...]
    """All tokens before the first of these blocks, so a publisher can compute routing keys."""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks whose content is gone; emitted before the block is used again."""

    block_ids: tuple[int, ...]
    reason: str
    """Capacity, TenantShare or Reset."""


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """The whole prefix cache was dropped."""


CacheEvent = BlocksStored | BlocksRemoved | CacheCleared


@dataclass(frozen=True, slots=True)
class Preempted:
    """One preemption, for metrics and log."""

    request_id: str
    mode: PreemptionMode
    reason: str
    num_blocks: int
    lost_tokens: int
    """Computed tokens that must be computed again."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Everything one call of `Scheduler.update` (or of `plan`, for refusals and preemptions) has to say."""

    sequences: tuple[SequenceOutput, ...] = ()
    prompts: tuple[PromptOutput, ...] = ()
    finished_requests: tuple[str, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    """Requests that were accepted and cannot go on (deadline passed, preempted under Reject)."""
    cache_events: tuple[CacheEvent, ...] = ()
    preemptions: tuple[Preempted, ...] = ()


@dataclass(frozen=True, slots=True)
class QueueCount:
    """Waiting or running requests of one class and tenant."""

    class_name: str
    tenant: str
    running: int
    waiting: dict[str, int]
    """By WaitReason value."""
    oldest_waiting_since: float | None


@dataclass(frozen=True, slots=True)
class SchedulerCounts:
    """Snapshot for metrics and /v1/state; cheap: no walk over blocks."""

    free_blocks: int
    cached_blocks: int
    used_blocks: int
    free_host_blocks: int
    used_host_blocks: int
    num_running: int
    num_waiting: int
    running_tokens: int
    waiting_tokens: int
    """Uncached prompt tokens not yet computed."""
    queues: tuple[QueueCount, ...] = ()
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    recomputed_tokens: int = 0
    cached_value_tokens: int = 0
    leaked_blocks: int = 0
    extra: dict[str, int] = field(default_factory=dict)
