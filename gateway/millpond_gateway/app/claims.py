"""Requests of one pool that wait a moment for their turn at a limit of their tenant which all gateways share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from millpond_gateway.flow.budget import CLAIM_SECONDS
from millpond_gateway.flow.queue import HoldQueue
from millpond_gateway.proxy.dispatch import Call, Waiter
from millpond_gateway.routing.records import RequestView, TenantHolds

_SOON: Final = 0.001
_LATE_SECONDS: Final = 0.03
_MAX_DELAYS: Final = 10
"""Of one claim: about a second on a process that is always late."""


class Waiting:
    """A held request and whom to tell."""

    __slots__ = ("call", "request", "tried", "waiter")

    def __init__(self, call: Call, request: RequestView, tried: frozenset[str], waiter: Waiter) -> None:
        self.call = call
        self.request = request
        self.tried = tried
        self.waiter = waiter


class Sharing:
    """Who admits requests beside this process; changed by whoever knows the others."""

    __slots__ = ("call_later", "count", "now", "origin")

    def __init__(self) -> None:
        self.origin = ""
        self.count: Callable[[], int] = _count_alone
        """Gateway processes, this one included."""
        self.now: Callable[[], float] = _no_time
        self.call_later: Callable[[float, Callable[[], None]], object] | None = None


def _count_alone() -> int:
    return 1


def _no_time() -> float:
    return 0.0


class Claim:
    """One waiting request and whom to tell."""

    __slots__ = ("adapter", "call", "due", "num_delays", "request", "waiter")

    def __init__(self, call: Call, adapter: str, request: RequestView, waiter: Waiter, due: float) -> None:
        self.call = call
        self.adapter = adapter
        self.request = request
        self.waiter = waiter
        self.due = due
        self.num_delays = 0


class ClaimDesk:
    """The claims of one pool, the oldest first."""

    def __init__(self, sharing: Sharing, settle: Callable[[], None]) -> None:
        self._sharing = sharing
        self._settle = settle
        self._claims: dict[str, Claim] = {}
        self.version = 0
        """Changes with each claim that comes or goes."""

    def __len__(self) -> int:
        return len(self._claims)

    def add(self, call: Call, adapter: str, request: RequestView, waiter: Waiter, now: float) -> None:
        """Wait until every gateway knows of the claim."""
        self._claims[call.id] = Claim(call, adapter, request, waiter, now + CLAIM_SECONDS)
        self.version += 1
        self._come_back()

    def remove(self, call_id: str) -> None:
        """The client left."""
        if self._claims.pop(call_id, None) is not None:
            self.version += 1

    def take_due(self, now: float) -> Claim | None:
        """The oldest claim whose time has come.

        Where this process is late itself, it has not read yet what the others said meanwhile: all claims wait once more.
        """
        claim = next(iter(self._claims.values()), None)
        if claim is None or claim.due > now:
            return None
        if now - claim.due > _LATE_SECONDS and claim.num_delays < _MAX_DELAYS:
            for late in self._claims.values():
                late.due = now + CLAIM_SECONDS
                late.num_delays += 1
            self._come_back()
            return None
        del self._claims[claim.call.id]
        self.version += 1
        return claim

    def take_all(self) -> list[Claim]:
        """Every claim, due or not."""
        claims = list(self._claims.values())
        self._claims.clear()
        self.version += 1
        return claims

    def _come_back(self) -> None:
        if self._sharing.call_later is not None:
            self._sharing.call_later(CLAIM_SECONDS + _SOON, self._settle)

    def make_holds(self, queue: HoldQueue) -> TenantHolds:
        """What peers are told: what is held here and what is claimed."""
        claims: dict[str, tuple[int, int]] = {}
        for claim in self._claims.values():
            num, tokens = claims.get(claim.request.tenant, (0, 0))
            claims[claim.request.tenant] = (num + 1, tokens + claim.request.budget_tokens)
        return TenantHolds(queue.count_tenants(), queue.count_tenant_tokens(), claims)
