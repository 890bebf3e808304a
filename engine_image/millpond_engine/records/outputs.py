"""What the scheduler reports after a step: tokens for clients, cache events, and what it decided, with reasons."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import msgspec

from millpond_engine.records.request import FinishReason, PreemptionMode, Refusal
from millpond_engine.records.step import TokenLogprobs


class SequenceOutput(msgspec.Struct, frozen=True, gc=False):
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
    message: str = ""
    """Why the sequence failed, when its row failed alone."""


@dataclass(frozen=True, slots=True)
class PromptOutput:
    """A request's prompt is computed: reported once, before or with its first token."""

    request_id: str
    cached_tokens: int
    """Prompt tokens taken from the prefix cache, counted when blocks were granted."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """For prompt positions 1 .., when asked for."""


class TokenView(Sequence[int]):
    """The first tokens of a growing sequence, read without a copy.

    Tokens of a sequence never change, only grow, so the view stays true. Making a tuple of it costs
    the whole prefix: a publisher that remembers the key of the parent block needs no prefix at all.
    """

    __slots__ = ("_length", "_tokens")

    def __init__(self, tokens: Sequence[int], length: int) -> None:
        self._tokens = tokens
        self._length = length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            return tuple(self._tokens[position] for position in range(*index.indices(self._length)))
        if not -self._length <= index < self._length:
            raise IndexError(index)
        return self._tokens[index % self._length]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens[: self._length])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Full blocks that became findable by prefix, parents before children."""

    block_ids: tuple[int, ...]
    parent_block_id: int | None
    tokens: tuple[int, ...]
    namespace: tuple[str, ...]
    prefix_tokens: Sequence[int]
    """All tokens before the first of these blocks, so a publisher can compute routing keys (a TokenView)."""


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


class OwnerCount(msgspec.Struct, frozen=True, gc=False):
    """Blocks of one class and tenant; a block that several share belongs to who computed it."""

    class_name: str
    tenant: str
    """Empty: all tenants that are not declared."""
    used_blocks: int
    cached_blocks: int
    host_blocks: int


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
    owners: tuple[OwnerCount, ...] = ()
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    recomputed_tokens: int = 0
    cached_value_tokens: int = 0
    leaked_blocks: int = 0
    failed_allocations: int = 0
    preemptions: int = 0
    bypasses: int = 0
    evicted_blocks: int = 0
