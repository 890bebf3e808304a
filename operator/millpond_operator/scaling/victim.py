"""Which replica leaves: pending ones first, then least cached value, then least remaining work; the last of a zone at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """One replica as scale-down sees it."""

    pod: str
    is_ready: bool
    cached_value: float
    """Prompt tokens that would have to be computed again without it, weighted by recent reuse."""
    open_requests: int
    zone: str = ""
    """Empty where nobody knows."""


def compute_cached_value(weighted_tokens: int, *, cached_tokens: int, unique_tokens: int) -> float:
    """What a replica's cache is worth to the pool: the engine's own value, less the share that others hold as well.

    Args:
        weighted_tokens: tokens in cached blocks weighted by recent reuse, as the engine says.
        cached_tokens: tokens that the gateways expect in its cache.
        unique_tokens: the part of them that no other replica holds.
    """
    return weighted_tokens * find_unique_share(cached_tokens=cached_tokens, unique_tokens=unique_tokens)


def find_unique_share(*, cached_tokens: int, unique_tokens: int) -> float:
    """Share of a replica's cache that no other replica holds; all of it while the gateways expect nothing there."""
    return min(1.0, unique_tokens / cached_tokens) if cached_tokens > 0 else 1.0


def rank_victims(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates in the order in which they should leave; equals keep the order they came in.

    Whoever would be the last ready replica of a zone, with those before it gone, waits for all that are not.
    """
    left = Counter(candidate.zone for candidate in candidates if candidate.is_ready and candidate.zone)
    spans_zones = len(left) > 1
    ranked, kept = [], []
    for candidate in sorted(candidates, key=_compute_cost):
        if candidate.is_ready and spans_zones and left[candidate.zone] == 1:
            kept.append(candidate)
            continue
        ranked.append(candidate)
        if candidate.is_ready:
            left[candidate.zone] -= 1
    return ranked + kept


def _compute_cost(candidate: Candidate) -> tuple[bool, float, int]:
    return candidate.is_ready, candidate.cached_value, candidate.open_requests
