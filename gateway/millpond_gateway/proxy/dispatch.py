"""The seam between the relay, which moves bytes, and whoever decides where they go.

The relay reports facts and gets targets or refusals; it knows no pool, no policy and no queue.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from millpond_common.contract.openai import ApiError
from millpond_gateway.proxy.records import Header, ParsedBody, RequestHead
from millpond_gateway.routing.records import EndpointView, Usage


class Outcome(StrEnum):
    """How a request, or one attempt of it, ended. One word for one cause in logs and metrics."""

    COMPLETED = "Completed"
    """The engine's answer passed to its end, whatever its status."""
    CLIENT_LEFT = "ClientLeft"
    CLIENT_STALLED = "ClientStalled"
    REFUSED = "Refused"
    """The gateway answered itself."""
    OVERLOADED = "Overloaded"
    """The engine was too busy and had not started: load, not a fault."""
    CONNECT_FAILED = "ConnectFailed"
    CONNECTION_STALE = "ConnectionStale"
    """A kept connection closed before it took a byte of the request."""
    REPLICA_GONE = "ReplicaGone"
    """The engine's process ended or began anew: what it had been sent is gone with it."""
    REPLICA_FAILED = "ReplicaFailed"
    """Broken before the first byte, and nothing proves that the engine had not started."""
    STREAM_BROKEN = "StreamBroken"
    """Broken after the first byte."""
    BAD_ANSWER = "BadAnswer"
    FIRST_BYTE_DEADLINE = "FirstByteDeadline"
    IDLE_DEADLINE = "IdleDeadline"
    TOTAL_DEADLINE = "TotalDeadline"
    SHUTDOWN = "Shutdown"
    HEDGE_LOST = "HedgeLost"
    """Another attempt of the same request answered first."""


HEDGE_WON, HEDGE_LOST = "Won", "Lost"
"""What became of a second attempt."""
DEADLINES = frozenset({Outcome.FIRST_BYTE_DEADLINE, Outcome.IDLE_DEADLINE, Outcome.TOTAL_DEADLINE})
FAULTS = frozenset(
    {
        Outcome.CONNECT_FAILED,
        Outcome.REPLICA_GONE,
        Outcome.REPLICA_FAILED,
        Outcome.STREAM_BROKEN,
        Outcome.BAD_ANSWER,
        Outcome.FIRST_BYTE_DEADLINE,
        Outcome.IDLE_DEADLINE,
    }
)
"""Outcomes that are evidence against the replica; an overload, a 4xx or a client's leaving is none."""


class Caller(msgspec.Struct, frozen=True, gc=False):
    """Who asks, as the gateway established it; never as the client claims it."""

    tenant: str = ""
    pin: str = ""
    """UID of the replica that a readiness probe asks for."""
    secrets: frozenset[str] = frozenset()
    """Secrets that hold its API key."""
    refusal: ApiError | None = None
    """Why its key opens no pool that asks for one."""
    keyed: bool = False
    """What it wrote as its key was read here, and stays here."""


class Trace(Protocol):
    """An open span."""

    traceparent: bytes
    """W3C trace context for the engine."""


class Call(msgspec.Struct, frozen=True):
    """One request, understood."""

    id: str
    """Unique in this process, unlike `request_id`."""
    request_id: str
    """The client's own, or made here."""
    path: str
    caller: Caller
    client: str
    """Address the client connected from."""
    body: ParsedBody
    session: bytes | None
    arrived_at: float
    trace: Any = None
    """A `Trace`, where traces are made."""


class Target(msgspec.Struct, frozen=True):
    """One replica chosen and reserved for one attempt."""

    endpoint: EndpointView
    pool: str
    reservation: int
    """Names the reservation to whoever made it."""
    traffic_class: str = ""
    ttft_seconds: float | None = None
    """Target of the class: the engine is told how much of it is left."""
    reserved_at: float = 0.0
    predicted_seconds: float = 0.0
    """Until the first token, as the choice saw it."""
    cached_tokens: int = 0
    prompt_tokens: int = 0
    decision: str = ""
    """Score breakdown as text, made only where somebody reads it."""
    debug: tuple[Header, ...] = ()
    """Score breakdown for the debug headers, made only when they are on."""

    def count_left_milliseconds(self, waited_seconds: float) -> int | None:
        """Until the first token is due; 1 when it is overdue, None without a target."""
        if self.ttft_seconds is None:
            return None
        return max(1, round(1000 * (self.ttft_seconds - waited_seconds)))


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ended, for reservations, speed, ejection and audit."""

    outcome: Outcome
    status: int | None = None
    usage: Usage | None = None
    sent: bool = False
    """Some engine was sent the request."""
    num_events: int = 0
    """Events of a stream that came from the engine."""


Decision = Target | ApiError
Waiter = Callable[[Decision], None]


class Dispatcher(Protocol):
    """Decides; called on the relay's loop, never blocking."""

    def identify(self, head: RequestHead, now: float) -> Caller | ApiError:
        """Who calls, before the body is read; or why not."""

    def place(self, caller: Caller, model: str) -> Caller:
        """The caller as the pool of this model knows it."""

    def submit(self, call: Call, tried: frozenset[str], waiter: Waiter, now: float) -> Decision | None:
        """Choose and reserve; None holds the request until `waiter` is called, once.

        `tried` are UIDs that failed or refused this request before: they are not chosen again.
        """

    def withdraw(self, call: Call, now: float) -> None:
        """The held request's client left: its waiter must not be called any more."""

    def first_byte(self, call: Call, target: Target, now: float) -> None:
        """The engine's answer began."""

    def is_late(self, call: Call, target: Target, now: float) -> bool:
        """Whether a second attempt would be worth it, should the engine not have begun the first."""

    def hedge(self, call: Call, target: Target, tried: frozenset[str], now: float) -> Target | None:
        """Choose and reserve a second replica for a late attempt that has not begun; None for no."""

    def release(self, call: Call, target: Target, ending: Ending, now: float) -> None:
        """The attempt ended; called exactly once for each target."""

    def finish(self, call: Call, record: Record, now: float) -> Usage | None:
        """The request is over; called exactly once for each call that was submitted.

        Returns what it is taken to have used, counted by the engine or, where that told nothing, estimated.
        """

    def note_epoch(self, target: Target, epoch: str, now: float) -> None:
        """An answer told the engine's epoch."""

    def find_models(self, caller: Caller) -> tuple[ModelCard, ...]:
        """Models this caller may use."""


class ModelCard(msgspec.Struct, frozen=True):
    """One entry of `/v1/models`."""

    id: str
    root: str
    parent: str | None = None
    max_model_tokens: int | None = None
    created: int = 0


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One finished request for the access log and the metrics; no part of a prompt or an answer."""

    request_id: str
    method: str
    path: str
    model: str
    tenant: str
    traffic_class: str
    endpoint: str
    status: int
    """As the client saw it; 0 when it saw none."""
    outcome: Outcome
    reason: str
    stream: bool
    attempts: int
    seconds: float
    first_byte_seconds: float | None
    bytes_in: int
    bytes_out: int
    usage: Usage | None = None
    estimated: bool = False
    """The engine told no usage: what was seen of the answer stands for it."""
    num_events: int = 0
    """Events of a stream that came from the engine."""
    hedged: str = ""
    """HEDGE_WON or HEDGE_LOST; empty without a second attempt."""
    decision: str = ""
    """Score breakdown of the last choice; only where traces are made or decisions exposed."""
    trace: Any = None
    sent: bool = False
    """Some engine was sent the request."""


class Observer(Protocol):
    """Told about every request."""

    def begin(self, head: RequestHead) -> Trace | None:
        """A complete request came; its open span, where traces are made."""

    def observe(self, record: Record) -> None:
        """Count and log it."""
