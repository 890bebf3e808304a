"""What every choice makes one of for each candidate: made often, so a class that compiles to a plain structure."""

from __future__ import annotations

from typing import Final

_LEAST_LEFT: Final = 1.0 / 32.0
"""Part of a prompt that counts until its first token has come: an idle replica is better."""


class Score:
    """Cost of one candidate in seconds, term by term; nobody changes it."""

    __slots__ = (
        "affinity_seconds",
        "cached_tokens",
        "decode_seconds",
        "held_tokens",
        "own_seconds",
        "queue_seconds",
        "queued_tokens",
        "routed_tokens",
        "tokens_per_second",
        "total_seconds",
        "uid",
        "uncached_tokens",
    )

    def __init__(
        self,
        uid: str,
        *,
        queue_seconds: float,
        own_seconds: float,
        decode_seconds: float,
        affinity_seconds: float,
        queued_tokens: int,
        uncached_tokens: int,
        cached_tokens: int,
        tokens_per_second: float,
        routed_tokens: int,
        held_tokens: int | None,
    ) -> None:
        self.uid = uid
        self.total_seconds = queue_seconds + own_seconds + decode_seconds + affinity_seconds
        self.queue_seconds = queue_seconds
        """Uncached tokens in flight that are still to compute, over speed."""
        self.own_seconds = own_seconds
        """Price of recompute times the request's own uncached tokens, over speed."""
        self.decode_seconds = decode_seconds
        self.affinity_seconds = affinity_seconds
        self.queued_tokens = queued_tokens
        self.uncached_tokens = uncached_tokens
        self.cached_tokens = cached_tokens
        self.tokens_per_second = tokens_per_second
        self.routed_tokens = routed_tokens
        """Part of the prediction from routed requests alone."""
        self.held_tokens = held_tokens
        """Part of the prediction from KV events alone; None without them."""

    @property
    def wait_seconds(self) -> float:
        """Seconds until the first token: queue and own uncached tokens over speed, without the price."""
        return self.queue_seconds + self.uncached_tokens / self.tokens_per_second


class Prediction:
    """Expected cached prompt tokens on one replica, blended and by layer."""

    __slots__ = ("cached_tokens", "held_tokens", "routed_tokens")

    def __init__(self, cached_tokens: int, routed_tokens: int, held_tokens: int | None) -> None:
        self.cached_tokens = cached_tokens
        self.routed_tokens = routed_tokens
        self.held_tokens = held_tokens
        """None without an event stream."""


class Load:
    """What is reserved on one replica; the book that counts it changes it in place."""

    __slots__ = (
        "decoding_blocks",
        "kv_blocks",
        "num_decoding",
        "num_prefilling",
        "oldest_tokens",
        "output_tokens",
        "progress_at",
        "queued_tokens",
    )

    def __init__(
        self,
        queued_tokens: int = 0,
        output_tokens: int = 0,
        kv_blocks: int = 0,
        decoding_blocks: int = 0,
        num_prefilling: int = 0,
        num_decoding: int = 0,
    ) -> None:
        self.queued_tokens = queued_tokens
        """Uncached prompt tokens whose first token has not come."""
        self.output_tokens = output_tokens
        """Expected output tokens of open requests."""
        self.kv_blocks = kv_blocks
        self.decoding_blocks = decoding_blocks
        """Part of them whose first token has come: requests still queued in the engine hold none yet."""
        self.num_prefilling = num_prefilling
        self.num_decoding = num_decoding
        self.oldest_tokens = 0
        """Part of the queued ones: those of the request that waits longest."""
        self.progress_at = 0.0
        """When the replica last gave a first token, or got work after it had none."""

    def remaining_tokens(self, tokens_per_second: float, now: float) -> float:
        """Queued tokens less what must have been computed of the longest waiting prompt since the last first token.

        An overdue prompt counts up again, to the whole of it: a replica that is late or stuck is not free.
        """
        done = (now - self.progress_at) * tokens_per_second
        if done <= 0.0:
            return float(self.queued_tokens)
        oldest = float(self.oldest_tokens)
        left = max(abs(oldest - done), oldest * _LEAST_LEFT)
        return self.queued_tokens - oldest + min(left, oldest)
