"""Settings of routing, with the defaults and where each comes from."""

from __future__ import annotations

import msgspec

from millpond_gateway.routing.records import Policy


class RevisionWeight(msgspec.Struct, frozen=True):
    """Share of new requests that one revision gets; weights are relative."""

    revision: str
    weight: float


class RoutingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How one pool routes."""

    model: str = ""
    """Model name inside block keys."""
    key_seed: int = 0
    """Seed of block keys; gateway and engines of a pool share it."""
    policy: Policy = Policy.AUTO
    price_of_recompute: float = 5.0
    """Highest λ: recomputing a token against queueing behind one (`spec.gateway.priceOfRecompute`); less at low load."""
    price_of_sharing: float = 0.5
    """Least λ of tokens that several sessions share: another copy of a hot prefix serves many later requests."""
    prefix_price_of_recompute: float = 50.0
    """λ of policy Prefix: nearly always the longest prefix, yet never whatever the queue."""
    tie_tokens: float = 64.0
    """Costs closer than the time of this many tokens are equal: estimates are no better."""
    tie_fraction: float = 0.02
    affinity_tokens: int = 512
    """Price, in tokens' worth of time, of leaving the replica that served the session before."""
    decode_price: float = 0.02
    """Price of one expected output token in flight, in prefill tokens; 1 for requests of role Decode."""
    kv_soft_percent: int = 90
    """Decode pressure grows steeply once reserved KV blocks pass this share."""
    default_tokens_per_second: float = 8000.0
    """Prefill speed before anything was measured."""
    speculative_seconds: float = 3.0
    """A routed prefix this young counts although no KV event has confirmed it."""
    index_bytes: int = 256 * 1024 * 1024
    """Bound of the routed-requests index of the pool."""
    default_blocks: int = 65536
    """Size of a replica's prefix cache in blocks while the engine has not told it."""
    revision_weights: tuple[RevisionWeight, ...] = ()
    """Empty: all revisions share by load."""
    hash_bound: float = 1.25
    """Partition fallback: a replica takes at most this multiple of the mean load."""
