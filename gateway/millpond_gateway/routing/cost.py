"""The routing rule: cost of a replica in seconds, term by term.

    cost(r) = U[r]/s[r] + λ·u/s[r] + D(r)  (+ affinity)

U are uncached tokens reserved on r whose first token has not come, u the request's own uncached tokens, s the
learned prefill speed, D decode pressure: about zero while KV blocks are free, steep near the block limit.
"""

from __future__ import annotations

import math

from millpond_gateway.routing.index import Prediction
from millpond_gateway.routing.records import EndpointView, ReplicaLoad, RequestView, Role, Score
from millpond_gateway.routing.settings import RoutingSettings


def compute_score(
    endpoint: EndpointView,
    load: ReplicaLoad,
    request: RequestView,
    settings: RoutingSettings,
    *,
    prediction: Prediction,
    tokens_per_second: float,
    away_from_home: bool,
) -> Score:
    """Cost of serving `request` on `endpoint`; `away_from_home`: its session was served elsewhere before."""
    uncached = compute_uncached_tokens(request, prediction.cached_tokens)
    queue_seconds = load.queued_tokens / tokens_per_second
    own_seconds = settings.price_of_recompute * uncached / tokens_per_second
    decode_seconds = compute_decode_pressure(endpoint, load, request, settings) / tokens_per_second
    affinity_seconds = settings.affinity_tokens / tokens_per_second if away_from_home else 0.0
    return Score(
        endpoint.uid,
        queue_seconds + own_seconds + decode_seconds + affinity_seconds,
        queue_seconds,
        own_seconds,
        decode_seconds,
        affinity_seconds,
        load.queued_tokens,
        uncached,
        prediction.cached_tokens,
        tokens_per_second,
        prediction.routed_tokens,
        prediction.held_tokens,
    )


def compute_uncached_tokens(request: RequestView, cached_tokens: int) -> int:
    """Prompt tokens a replica must compute: even a full hit computes the last one; a decode leg none."""
    if request.role is Role.DECODE:
        return 0
    return max(request.prompt.num_tokens - cached_tokens, 1)


def compute_decode_pressure(
    endpoint: EndpointView, load: ReplicaLoad, request: RequestView, settings: RoutingSettings
) -> float:
    """Decode pressure in prefill tokens.

    Each expected output token in flight costs a little. Blocks past the soft limit will be bought by preempting
    or waiting, and cost their recomputation times its price.
    """
    price = 1.0 if request.role is Role.DECODE else settings.decode_price
    pressure = price * load.output_tokens
    if endpoint.num_blocks is None:
        return pressure
    needed = load.kv_blocks + compute_kv_blocks(endpoint, request)
    soft_limit = endpoint.num_blocks * settings.kv_soft_percent // 100
    if needed > soft_limit:
        pressure += settings.price_of_recompute * (needed - soft_limit) * endpoint.block_tokens
    return pressure


def compute_kv_blocks(endpoint: EndpointView, request: RequestView) -> int:
    """Blocks that hold prompt and expected output; shared prefixes count in full, which errs on the safe side."""
    if request.role is Role.PREFILL:
        return math.ceil(request.prompt.num_tokens / endpoint.block_tokens)
    tokens = request.prompt.num_tokens + request.expected_output_tokens
    return math.ceil(tokens / endpoint.block_tokens)


def compute_tie_band(best: Score, settings: RoutingSettings) -> float:
    """Seconds above the best cost within which costs are equal."""
    tokens_band = settings.tie_tokens / best.tokens_per_second
    return max(tokens_band, settings.tie_fraction * best.total_seconds)
