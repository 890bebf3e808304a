"""Choice without peers: consistent hashing with bounded load, so that gateways agree without talking.

Rendezvous hashing orders the replicas for a key; the first one whose load stays under a multiple of the mean
takes the request (Mirrokni, Thorup, Zadimoghaddam 2016).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import xxhash

from millpond_gateway.routing.records import RequestView
from millpond_gateway.routing.score import Score
from millpond_gateway.routing.settings import RoutingSettings

_HASHED_BLOCK: Final = 3
"""Block whose key stands for the prefix: late enough to tell system prompts apart, early enough to be shared."""


def choose_by_hash(scores: Sequence[Score], request: RequestView, settings: RoutingSettings) -> int:
    """Position of the chosen candidate; the cheapest one for a prompt without key or session."""
    key = _find_key(request)
    if key is None:
        return min(range(len(scores)), key=lambda position: scores[position].total_seconds)
    loads = [score.queue_seconds + score.decode_seconds for score in scores]
    own = max(score.own_seconds for score in scores)
    bound = settings.hash_bound * (sum(loads) + own) / len(loads)
    order = sorted(range(len(scores)), key=lambda position: _weigh(key, scores[position].uid), reverse=True)
    return next((position for position in order if loads[position] <= bound), order[0])


def _find_key(request: RequestView) -> int | None:
    if request.session is not None:
        return request.session
    keys = request.prompt.keys
    return keys[min(_HASHED_BLOCK, len(keys) - 1)] if keys else None


def _weigh(key: int, uid: str) -> int:
    return xxhash.xxh3_64_intdigest(uid.encode(), seed=key)
