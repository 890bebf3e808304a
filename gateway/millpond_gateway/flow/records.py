"""What passes between admission and its callers: frozen records with reasons."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from millpond_common.contract.openai import ERROR_KINDS, ErrorCode


class Action(StrEnum):
    """The gateway's three answers."""

    ADMIT = "Admit"
    HOLD = "Hold"
    SHED = "Shed"


class FlowReason(StrEnum):
    """Why a request is admitted, held or shed; the value of the reason header and of the metric label."""

    CAPACITY = "Capacity"
    """Some replica starts it within its class's target."""
    SATURATED = "Saturated"
    """Every replica's predicted wait exceeds the class's target."""
    QUEUED_BEHIND = "QueuedBehind"
    """Others of the pool are held already; passing them would be unfair."""
    CLASS_GATED = "ClassGated"
    """The class waits while another class has a queue."""
    NO_REPLICA = "NoReplica"
    COLD_START = "ColdStart"
    """The pool is at zero and is being started."""
    SHEDDABLE = "Sheddable"
    """Saturated, and the class is shed rather than held."""
    TENANT_CONCURRENCY = "TenantConcurrency"
    TENANT_TOKENS = "TenantTokens"
    TENANT_SHARE = "TenantShare"
    """Close to a limit of its tenant that all gateways share: waits a moment until all know what the others admitted."""
    TOKENS_NEVER_FIT = "TokensNeverFit"
    """More tokens than the tenant's limit ever allows at once."""
    QUEUE_FULL = "QueueFull"
    HELD_BYTES = "HeldBytes"
    HOLD_EXPIRED = "HoldExpired"


_CODES: dict[FlowReason, ErrorCode] = {
    FlowReason.NO_REPLICA: ErrorCode.NO_REPLICA,
    FlowReason.COLD_START: ErrorCode.COLD_START,
    FlowReason.TENANT_CONCURRENCY: ErrorCode.TENANT_CONCURRENCY,
    FlowReason.TENANT_TOKENS: ErrorCode.TENANT_TOKENS,
    FlowReason.TOKENS_NEVER_FIT: ErrorCode.TENANT_TOKENS,
}
_SHED_STATUS: dict[FlowReason, int] = {
    FlowReason.SHEDDABLE: 429,
    FlowReason.SATURATED: 429,
    FlowReason.QUEUE_FULL: 429,
    FlowReason.HELD_BYTES: 429,
    FlowReason.HOLD_EXPIRED: 429,
}


class RemoteHolds(msgspec.Struct, frozen=True, gc=False):
    """What another gateway process holds of tenants' requests."""

    requests: dict[str, int]
    tokens: dict[str, int]
    claims: dict[str, tuple[int, int]]


class Verdict(msgspec.Struct, frozen=True):
    """One answer. For a shed request, `status` and `code` are what the client gets."""

    action: Action
    reason: FlowReason
    retry_after_seconds: int | None = None
    """Computed from measured speed; None where waiting does not help."""

    @property
    def code(self) -> ErrorCode:
        """Code of the error body."""
        return _CODES.get(self.reason, ErrorCode.OVERLOADED)

    @property
    def status(self) -> int:
        """HTTP status of a shed request: 429 while endpoints exist and load is the cause, 503 when none does."""
        return _SHED_STATUS.get(self.reason, ERROR_KINDS[self.code][0])


class ClassPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A traffic class as admission sees it."""

    name: str
    priority: int = 0
    """Higher is served first."""
    ttft_seconds: float | None = None
    """Target; requests are held while no replica is predicted to meet it."""
    sheddable: bool = False
    """Shed at once where others are held."""
    gate_class: str | None = None
    """Held while this class has at least `gate_below` requests held."""
    gate_below: int = 1


class TenantPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's share and limits; None means no limit."""

    name: str
    weight: int = 1
    max_concurrency: int | None = None
    tokens_per_minute: int | None = None


class FlowSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one pool's queue; those of the process are the relay's. Every one is on by default."""

    max_held: int = 4096
    max_held_bytes: int = 256 * 1024 * 1024
    max_hold_seconds: float = 30.0
    cold_start_hold_seconds: float = 300.0
    """0 where the pool never scales to zero: then nothing is held for a start."""
    default_ttft_seconds: float = 5.0
    """Target of a class that names none."""
    starvation_seconds: float = 10.0
    """A held request older than this is served ahead of higher bands, in at least every fourth turn."""
    hedge_percent: float = 2.0
    """Share of requests that may get a second attempt; 0 gives none."""
    quantum_tokens: int = 2048
    """Uncached tokens a tenant of weight 1 may send per round."""


class HeldRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request in the hold queue."""

    request_id: str
    tenant: str
    traffic_class: str
    uncached_tokens: int
    num_bytes: int
    arrived_at: float
    expires_at: float
    budget_tokens: int = 0
    """Charged to its tenant."""


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    """A pool as admission sees it at one instant."""

    num_endpoints: int
    """Endpoints that exist, loading ones included."""
    num_routable: int
    """Endpoints that may be chosen for this request."""
    queue_seconds: float | None
    """Shortest queue among them: uncached tokens in flight over speed; None without any."""
    own_seconds: float
    """The request's own uncached tokens over speed on that replica."""
    tokens_per_second: float
    """Learned prefill speed of all routable replicas together; 0 when none is."""
    starting: bool
    """The pool is at zero or has no ready replica yet, and something will start one."""
    num_held: int
    held_tokens: int
    start_seconds_left: float | None = None
    """Measured time to start a replica, less what has passed of it; None while no start was measured."""
    gated: bool = False
    """The request's class waits for another class; see `HoldQueue.is_gated`."""


class DemandView(msgspec.Struct, frozen=True, kw_only=True):
    """Rates at one instant; a rate is absent until its window is full."""

    uncached_tokens_per_second_15: float | None
    uncached_tokens_per_second_60: float | None
    output_tokens_per_second_60: float | None
    ttft_p90_milliseconds: dict[str, int]
    last_request_seconds_ago: float | None


class HedgeView(msgspec.Struct, frozen=True, kw_only=True):
    """A waiting request at one instant."""

    waited_seconds: float
    predicted_p99_seconds: float
    """99th percentile of the time to first token for this prediction, from measured errors."""
    provably_not_started: bool
    cached_tokens: int
    prompt_tokens: int
    pool_saturated: bool
    num_other_candidates: int


class OutlierSettings(msgspec.Struct, frozen=True, kw_only=True):
    """When a replica is out, and for how long."""

    window_seconds: float = 30.0
    min_faults: int = 5
    fault_percent: int = 50
    """Share of attempts in the window that must be faults."""
    min_clients: int = 3
    """Different clients that must have seen faults; a failing probe stands for all."""
    max_ejected_percent: int = 30
    first_ejection_seconds: float = 10.0
    max_ejection_seconds: float = 300.0


class OutlierVerdict(msgspec.Struct, frozen=True):
    """Who is out now."""

    ejected: frozenset[str]
    probing: frozenset[str]
    """Half-open: their ejection ran out; a success closes the breaker, faults of two clients or a failing probe open
    it again."""
    suspects: frozenset[str]
    """Faults of too few clients to tell the replica's fault from the client's: probe them."""
    capped: bool
    """More replicas fail than may be ejected: a condition for the operator."""
