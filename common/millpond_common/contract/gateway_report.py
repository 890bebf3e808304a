"""What a gateway tells the operator on its admin port: `GET /v1/report` and `POST /v1/probe`."""

from __future__ import annotations

import msgspec


class EndpointReport(msgspec.Struct, frozen=True, rename="camel"):
    """One replica as this gateway sees it."""

    pod: str
    pod_uid: str
    revision: str
    role: str
    routable: bool
    """The gateway may choose it for a new request now."""
    open_requests: int
    """Requests this gateway has in flight on it."""
    uncached_tokens: int
    """Uncached prompt tokens reserved on it whose first token has not come."""
    speed_tokens_per_second: float | None = None
    cached_tokens: int = 0
    """Tokens of prefixes that the index expects on it."""
    unique_cached_tokens: int = 0
    """The part of them that no other replica of the pool holds."""
    epoch: str | None = None


class RevisionReport(msgspec.Struct, frozen=True, rename="camel"):
    """How one revision did at this gateway since it saw it first. Whole numbers, so that reports can be added up."""

    revision: str
    num_requests: int
    """Attempts that say something about the replica: neither a client's fault, nor an overload."""
    num_failed: int
    ttft_counts: tuple[tuple[int, int], ...] = ()
    """Requests by time to first token: upper bound in milliseconds, count; ascending, empty buckets left out."""


class PoolReport(msgspec.Struct, frozen=True, rename="camel"):
    """Demand and endpoints of one pool at this gateway. Rates are means over the named window, absent while it is not full."""

    pool: str
    endpoints: tuple[EndpointReport, ...]
    uncached_tokens_per_second_15: float | None = None
    uncached_tokens_per_second_60: float | None = None
    """Uncached prompt tokens that arrived, held and shed requests included, retries once."""
    output_tokens_per_second_60: float | None = None
    held_requests: int = 0
    held_tokens: int = 0
    """Uncached tokens waiting in the gateway, not yet bound to a replica."""
    queued_tokens: int = 0
    """Uncached tokens bound to a replica whose first token has not come."""
    ttft_p90_milliseconds: dict[str, int] = {}
    """Per class, over the last minute; a class without requests is absent."""
    last_request_seconds_ago: float | None = None
    revisions: tuple[RevisionReport, ...] = ()
    """Of the replicas it knows now; absent until a request went to one."""


class GatewayReport(msgspec.Struct, frozen=True, rename="camel"):
    """Everything at one instant."""

    gateway: str
    epoch: str
    observed_at: float
    """Unix time of this snapshot."""
    view_age_seconds: float
    """Seconds since the watch of pools and pods last proved itself alive."""
    synced: bool
    """The first full lists of pools and pods are in."""
    pools: tuple[PoolReport, ...]


class ProbeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Ask the gateway to send one real one-token request to one replica through its data path."""

    pool: str
    pod_uid: str
    timeout_seconds: float = 30.0


class ProbeResult(msgspec.Struct, frozen=True, rename="camel"):
    """Outcome of a probe; `ok` only when the replica produced a token."""

    ok: bool
    status: int | None
    message: str
    seconds: float
