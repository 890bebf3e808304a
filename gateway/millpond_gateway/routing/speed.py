"""Learned prefill speed of each replica, in uncached tokens per second.

A sample is work over busy time: a request's uncached tokens over the seconds from its reservation, or from
the previous first token on that replica if that came later, to its own first token. Summed over a busy period
this is exact for any work-conserving order of prefills, chunked ones included.
"""

from __future__ import annotations

from statistics import median
from typing import Final

_DECAY: Final = 0.98
_PRIOR_TOKENS: Final = 2048.0
_MIN_SAMPLE_TOKENS: Final = 64


class _Learned:
    __slots__ = ("last_first_token", "seconds", "tokens")

    def __init__(self) -> None:
        self.tokens = 0.0
        self.seconds = 0.0
        self.last_first_token = float("-inf")


class SpeedBook:
    """Speeds of one pool's replicas; the prior of a replica without samples is the pool's median."""

    def __init__(self, default_tokens_per_second: float) -> None:
        self._default = default_tokens_per_second
        self._learned: dict[str, _Learned] = {}
        self._priors: dict[str, float] = {}
        self._cache: dict[str, float] = {}
        self._median: float | None = None

    def set_prior(self, uid: str, tokens_per_second: float | None) -> None:
        """Take the engine's own measurement as the prior of one replica."""
        if tokens_per_second is None or tokens_per_second <= 0:
            self._priors.pop(uid, None)
        else:
            self._priors[uid] = tokens_per_second
        self._forget_cache()

    def observe(self, uid: str, *, uncached_tokens: int, reserved_at: float, now: float) -> None:
        """Learn from one first token."""
        learned = self._learned.setdefault(uid, _Learned())
        started = max(reserved_at, learned.last_first_token)
        learned.last_first_token = max(now, learned.last_first_token)
        if uncached_tokens < _MIN_SAMPLE_TOKENS or now < started:
            return
        learned.tokens = learned.tokens * _DECAY + uncached_tokens
        learned.seconds = learned.seconds * _DECAY + (now - started)
        self._forget_cache()

    def drop(self, uid: str) -> None:
        """Forget a replica that is gone or began anew."""
        self._learned.pop(uid, None)
        self._priors.pop(uid, None)
        self._forget_cache()

    def tokens_per_second(self, uid: str) -> float:
        """Best estimate, always positive."""
        speed = self._cache.get(uid)
        if speed is None:
            prior = self._priors.get(uid) or self._pool_median()
            speed = self._cache[uid] = self._estimate(uid, prior)
        return speed

    def measured(self, uid: str) -> float | None:
        """The estimate where at least one sample exists, else None."""
        learned = self._learned.get(uid)
        return self.tokens_per_second(uid) if learned is not None and learned.tokens > 0 else None

    def _estimate(self, uid: str, prior: float) -> float:
        learned = self._learned.get(uid)
        if learned is None or learned.tokens <= 0:
            return prior
        return (learned.tokens + _PRIOR_TOKENS) / (learned.seconds + _PRIOR_TOKENS / prior)

    def _pool_median(self) -> float:
        if self._median is None:
            samples = [
                learned.tokens / learned.seconds
                for learned in self._learned.values()
                if learned.seconds > 0 and learned.tokens > _PRIOR_TOKENS
            ]
            samples = samples or list(self._priors.values())
            self._median = median(samples) if samples else self._default
        return self._median

    def _forget_cache(self) -> None:
        self._cache.clear()
        self._median = None
