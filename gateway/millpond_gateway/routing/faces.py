"""What a router tells of: its own decisions to whoever shares them, and peers' to whoever counts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from millpond_gateway.routing.records import Reservation, TenantHolds


class DecisionSink(Protocol):
    """Who is told of this process's own decisions; see `shared.SharedDecisions`."""

    def reserve(self, pool: str, reservation: Reservation, keys: Sequence[int]) -> None:
        """A replica was chosen and booked."""

    def first_token(self, pool: str, reservation_id: int) -> None:
        """The prefill part is free."""

    def release(self, pool: str, reservation_id: int, used_tokens: int | None = None) -> None:
        """The reservation ended; `used_tokens` where the engine counted them."""

    def hold(self, pool: str, num_held: int, tokens: int, holds: TenantHolds) -> None:
        """So much is held now, by tenant."""


class PeerObserver(Protocol):
    """Who is told of peers' requests; a tenant's limits count them too."""

    def peer_reserved(self, reservation: Reservation) -> None:
        """Another gateway process admitted a request."""

    def peer_released(self, reservation: Reservation, used_tokens: int | None = None) -> None:
        """It ended; `used_tokens` where the engine counted them."""

    def peer_held(self, origin: str, num_held: int, tokens: int, holds: TenantHolds) -> None:
        """Another gateway process holds so much now, by tenant."""
