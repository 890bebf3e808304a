"""Answer of an engine's `GET /v1/state`: what gateway and operator need, cheap to make and to read."""

from __future__ import annotations

from typing import Literal

import msgspec


class BlockCounts(msgspec.Struct, frozen=True, rename="camel"):
    """Blocks of one tier; free + cached + in_use is the tier's size, always."""

    free: int
    cached: int
    in_use: int

    @property
    def total(self) -> int:
        """Size of the tier in blocks."""
        return self.free + self.cached + self.in_use


class Speeds(msgspec.Struct, frozen=True, rename="camel"):
    """Measured speeds; absent until measured on busy steps."""

    prefill_tokens_per_second: float | None = None
    """Uncached prompt tokens per second while prefilling."""
    decode_tokens_per_second: float | None = None
    """Output tokens per second, all sequences together, while decoding."""
    decode_seconds_per_step: float | None = None


class EngineState(msgspec.Struct, frozen=True, rename="camel"):
    """One engine at one instant."""

    epoch: str
    """Random 64-bit number of this start, 16 hex digits: a change means that caches and counters began anew."""
    model: str
    phase: Literal["Loading", "Ready", "Draining", "Asleep", "Failed"]
    uptime_seconds: float
    version: str
    block_tokens: int
    device: BlockCounts
    host: BlockCounts
    max_model_tokens: int
    num_running: int
    """Requests in the batch."""
    num_waiting: int
    running_tokens: int
    """Context tokens held by running sequences."""
    waiting_tokens: int
    """Uncached prompt tokens not yet computed, queued and half-prefilled requests together."""
    open_requests: int
    """Requests whose response has not ended: what a drain waits for."""
    cached_value_tokens: int
    """Tokens in cached blocks weighted by recent reuse; the least valuable replica is the scale-down victim."""
    speeds: Speeds
    load_seconds: float | None = None
    """Measured time from process start to ready."""
    kv_events_sequence: int = 0
    prefix_hit_tokens: int | None = None
    """Prompt tokens of this epoch that were found in the prefix cache instead of computed."""


class RequestState(msgspec.Struct, frozen=True, rename="camel"):
    """Answer of `GET /v1/requests/{id}`: what the engine knows about an `x-request-id` of this epoch.

    `Unknown` is a promise, not a shrug: nothing of the request was or will be computed. An engine that forgets
    finished requests answers `Finished` for ids it can no longer tell from them.
    """

    request_id: str
    epoch: str
    phase: Literal["Unknown", "Waiting", "Running", "Finished"]


def parse_engine_state(body: bytes) -> EngineState:
    """Decode the JSON body.

    Raises:
        msgspec.DecodeError: when it is not an engine state.
    """
    return msgspec.json.decode(body, type=EngineState)
