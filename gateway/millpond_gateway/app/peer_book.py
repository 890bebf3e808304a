"""Requests of other gateways in one pool: they count against the tenants' limits here, and what they hold is not passed."""

from __future__ import annotations

from millpond_gateway.app.judgement import count_charged
from millpond_gateway.flow.budget import Budgets
from millpond_gateway.routing.records import Reservation, TenantHolds


class PeerBook:
    """Told by the pool's router of what peers decide."""

    __slots__ = ("_budgets", "_holds")

    def __init__(self, budgets: Budgets) -> None:
        self._budgets = budgets
        self._holds: dict[str, tuple[int, int]] = {}

    def peer_reserved(self, reservation: Reservation) -> None:
        """Another gateway admitted a request."""
        self._budgets.charge_remote(reservation.tenant, count_charged(reservation), reservation.reserved_at)

    def peer_released(self, reservation: Reservation, used_tokens: int | None = None) -> None:
        """It ended; where nobody told what it used, what it had reserved stays charged."""
        unused = count_charged(reservation) - used_tokens if used_tokens is not None else 0
        self._budgets.release_remote(reservation.tenant, reservation.reserved_at, unused_tokens=unused)

    def peer_held(self, origin: str, num_held: int, tokens: int, holds: TenantHolds) -> None:
        """Another gateway holds so much now: requests here may not pass it, nor tenants their limits by it."""
        self._budgets.set_remote_held(origin, holds.requests, holds.tokens, holds.claims)
        if num_held:
            self._holds[origin] = (num_held, tokens)
        else:
            self._holds.pop(origin, None)

    @property
    def num_held(self) -> int:
        """Requests that other gateways hold."""
        return sum(held for held, _ in self._holds.values()) if self._holds else 0

    @property
    def held_tokens(self) -> int:
        """Their uncached tokens."""
        return sum(tokens for _, tokens in self._holds.values()) if self._holds else 0
