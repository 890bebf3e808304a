"""What discovery hands on: pools and observed replicas, frozen."""

from __future__ import annotations

import msgspec

from millpond_gateway.routing.records import EndpointView, Policy, Role


class PoolClass(msgspec.Struct, frozen=True, kw_only=True):
    """One traffic class of a pool."""

    name: str
    priority: int = 0
    ttft_seconds: float | None = None
    gate_class: str | None = None
    gate_below: int = 1


class PoolTenant(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant of a pool."""

    name: str
    weight: int = 1
    max_concurrency: int | None = None
    tokens_per_minute: int | None = None
    key_secret: str | None = None
    """Secret whose values are the tenant's API keys."""


class PoolPricing(msgspec.Struct, frozen=True, kw_only=True):
    """Price per million tokens, in `currency`."""

    currency: str
    input_per_million: float = 0.0
    cached_input_per_million: float = 0.0
    output_per_million: float = 0.0


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    """One pool as the gateway needs it."""

    name: str
    model: str
    root: str = ""
    """From which a client can load the tokenizer."""
    adapters: tuple[str, ...] = ()
    policy: Policy = Policy.AUTO
    price_of_recompute: float = 5.0
    max_model_tokens: int | None = None
    block_tokens: int = 16
    classes: tuple[PoolClass, ...] = ()
    default_class: str = "interactive"
    tenants: tuple[PoolTenant, ...] = ()
    pricing: PoolPricing | None = None
    cold_start_hold_seconds: float = 0.0
    """How long a request waits for a pool at zero; 0 where the pool never is."""
    may_be_zero: bool = False
    """Something starts a replica when a request comes."""
    start_seconds: float | None = None
    """Measured time to start a replica; None until one was."""
    warnings: tuple[str, ...] = ()
    """What of the object was left aside, and why."""
    revision_weights: dict[str, float] = {}
    """Shares of new requests by revision; empty: all revisions share by load."""
    created_at: int = 0
    """Unix time."""
    deleting: bool = False

    @property
    def seniority(self) -> tuple[bool, int, str]:
        """Sorts the pool first that keeps a name which several want."""
        return self.deleting, self.created_at, self.name


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One engine pod as the API server, or a flag, describes it."""

    uid: str
    pod: str
    pool: str
    address: str
    prefix: str = ""
    """Path in front of the engine's own, as `/llm`."""
    revision: str = ""
    role: Role = Role.BOTH
    ready: bool = False
    cordoned: bool = False
    static: bool = False
    """From a flag: readiness is what the engine itself answers."""
    events: str | None = None
    """Where a static replica publishes its KV events, `tcp://HOST:PORT`."""
    replay: str | None = None


class Peer(msgspec.Struct, frozen=True):
    """One pod of another gateway."""

    host: str
    addresses: tuple[str, ...]
    """Where its workers take shared decisions; empty for one that is not ready or is leaving."""


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica's engine told last."""

    answers: bool = False
    """It answered the last time it was asked."""
    ready: bool = True
    draining: bool = False
    epoch: str | None = None
    block_tokens: int | None = None
    num_blocks: int | None = None
    max_model_tokens: int | None = None
    prefill_tokens_per_second: float | None = None


class WorldSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything at one instant."""

    version: int
    pools: dict[str, PoolView]
    endpoints: dict[str, tuple[EndpointView, ...]]
    """By pool; replicas that are gone are absent."""
    synced: bool
