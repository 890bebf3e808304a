"""The routing rule: cost of a replica in seconds, term by term.

    cost(r) = U[r]/s[r] + (λ·u + p·v)/s[r] + D(r)  (+ affinity)

U are uncached tokens reserved on r whose first token has not come, less what r must have computed of them since
it last gave one, s the learned prefill speed, D decode pressure: about zero while KV blocks are free, steep near the block limit. The request's own missing tokens fall
into two kinds: v belong to a prefix that several sessions share, u to this request alone. Recomputing u delays
everybody later, by λ; recomputing v makes another copy for later requests, so p falls from λ with every use that
the copy can expect before its eviction.
λ follows the pool's utilization up to its setting. What is above the request's own time is paid at the pool's mean speed: a
slow replica's seconds delay fewer others, and with its own speed it stayed half idle beside full queues.
"""

from __future__ import annotations

from typing import Final

from millpond_gateway.routing.records import EndpointView, Policy, RequestView, Role
from millpond_gateway.routing.score import Load, Prediction, Score
from millpond_gateway.routing.settings import RoutingSettings

_DECODE: Final = Role.DECODE
_PREFILL: Final = Role.PREFILL


def compute_score(
    endpoint: EndpointView,
    load: Load,
    request: RequestView,
    settings: RoutingSettings,
    *,
    prediction: Prediction,
    shared_tokens: int,
    num_reuses: float,
    tokens_per_second: float,
    mean_tokens_per_second: float,
    price: float,
    away_from_home: bool,
    now: float,
) -> Score:
    """Cost of serving `request` on `endpoint`.

    Args:
        endpoint: the candidate.
        load: what is reserved on it.
        request: the request.
        settings: the pool's.
        prediction: what the candidate is expected to hold of the prompt.
        shared_tokens: leading prompt tokens that several sessions share.
        num_reuses: how often those would be used on the candidate before they are evicted there.
        tokens_per_second: learned speed.
        mean_tokens_per_second: of all candidates.
        price: λ for this choice; see `compute_price`.
        away_from_home: the session was served elsewhere before.
        now: seconds on the clock of the load's reservations.
    """
    cached = prediction.cached_tokens
    uncached = compute_uncached_tokens(request, cached)
    queue_seconds = load.remaining_tokens(tokens_per_second, now) / tokens_per_second
    missing_shared = min(shared_tokens - cached, uncached) if shared_tokens > cached else 0
    others_tokens = (price - 1.0) * (uncached - missing_shared)
    if missing_shared:
        others_tokens += (compute_price_of_sharing(price, num_reuses, settings) - 1.0) * missing_shared
    own_seconds = uncached / tokens_per_second + others_tokens / mean_tokens_per_second
    decode_tokens = compute_decode_pressure(endpoint, load, request, settings, uncached_tokens=uncached)
    decode_seconds = decode_tokens / tokens_per_second
    affinity_seconds = settings.affinity_tokens / tokens_per_second if away_from_home else 0.0
    return Score(
        endpoint.uid,
        queue_seconds=queue_seconds,
        own_seconds=own_seconds,
        decode_seconds=decode_seconds,
        affinity_seconds=affinity_seconds,
        queued_tokens=load.queued_tokens,
        uncached_tokens=uncached,
        cached_tokens=cached,
        tokens_per_second=tokens_per_second,
        routed_tokens=prediction.routed_tokens,
        held_tokens=prediction.held_tokens,
    )


def compute_price(utilization: float, settings: RoutingSettings) -> float:
    """λ for the pool's utilization: work added to a queue at utilization u delays later arrivals 1/(1-u) times.

    At most `price_of_recompute`; policy Prefix always pays its own, high price.
    """
    if settings.policy is Policy.PREFIX:
        return settings.prefix_price_of_recompute
    if utilization >= 1.0:
        return settings.price_of_recompute
    return min(1.0 / (1.0 - max(utilization, 0.0)), settings.price_of_recompute)


def compute_price_of_sharing(price: float, num_reuses: float, settings: RoutingSettings) -> float:
    """Price of the missing tokens of a shared prefix: λ when nobody uses the new copy again, less with each use.

    At least `price_of_sharing`.
    """
    least = settings.price_of_sharing
    return least + (price - least) / (1.0 + num_reuses) if price > least else least


def compute_uncached_tokens(request: RequestView, cached_tokens: int) -> int:
    """Prompt tokens a replica must compute: even a full hit computes the last one; a decode leg none."""
    if request.role is _DECODE:
        return 0
    uncached = request.prompt.num_tokens - cached_tokens
    return uncached if uncached > 1 else 1


def compute_decode_pressure(
    endpoint: EndpointView,
    load: Load,
    request: RequestView,
    settings: RoutingSettings,
    *,
    uncached_tokens: int,
) -> float:
    """Decode pressure in prefill tokens.

    Each expected output token in flight costs a little. Blocks past the soft limit will be bought by preempting
    or waiting, and cost their recomputation times its price.
    """
    price = 1.0 if request.role is _DECODE else settings.decode_price
    pressure = price * load.output_tokens
    num_blocks = endpoint.num_blocks
    if num_blocks is None:
        return pressure
    needed = load.decoding_blocks + compute_kv_blocks(endpoint, request, uncached_tokens)
    soft_limit = num_blocks * settings.kv_soft_percent // 100
    if needed > soft_limit:
        pressure += settings.price_of_recompute * (needed - soft_limit) * endpoint.block_tokens
    return pressure


def compute_kv_blocks(endpoint: EndpointView, request: RequestView, uncached_tokens: int) -> int:
    """Blocks the request takes from the free ones: cached ones are there already, shared by whoever uses them."""
    role = request.role
    if role is _DECODE:
        tokens = request.prompt.num_tokens + request.expected_output_tokens
    elif role is _PREFILL:
        tokens = uncached_tokens
    else:
        tokens = uncached_tokens + request.expected_output_tokens
    return -(-tokens // endpoint.block_tokens)


def compute_tie_band(best: Score, settings: RoutingSettings) -> float:
    """Seconds above the best cost within which costs are equal."""
    tokens_band = settings.tie_tokens / best.tokens_per_second
    return max(tokens_band, settings.tie_fraction * best.total_seconds)
