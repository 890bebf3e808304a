"""Load of every replica from reservations: booked before send, prefill freed at the first chunk, rest once.

A reservation is known by (origin, id): origin is the gateway process that made it, OWN is this one. Counters
are integers, so millions of reservations leave no drift behind.
"""

from __future__ import annotations

from typing import Final

from millpond_gateway.routing.records import ReplicaLoad, Reservation
from millpond_gateway.routing.score import Load

OWN: Final = ""


class _Totals(Load):
    __slots__ = ()

    def reserve(self, reservation: Reservation) -> None:
        self.output_tokens += reservation.output_tokens
        self.kv_blocks += reservation.kv_blocks
        self.queued_tokens += reservation.uncached_tokens
        self.num_prefilling += 1

    def first_token(self, reservation: Reservation) -> None:
        self.queued_tokens -= reservation.uncached_tokens
        self.num_prefilling -= 1
        self.decoding_blocks += reservation.kv_blocks
        self.num_decoding += 1

    def release(self, reservation: Reservation, *, decoding: bool) -> None:
        self.output_tokens -= reservation.output_tokens
        self.kv_blocks -= reservation.kv_blocks
        if decoding:
            self.decoding_blocks -= reservation.kv_blocks
            self.num_decoding -= 1
        else:
            self.queued_tokens -= reservation.uncached_tokens
            self.num_prefilling -= 1


class _Replica:
    __slots__ = ("all", "entries", "own", "waiting")

    def __init__(self) -> None:
        self.all = _Totals()
        self.own = _Totals()
        self.entries: set[tuple[str, int]] = set()
        self.waiting: dict[tuple[str, int], int] = {}
        """Uncached tokens of what has no first token yet, the oldest first."""

    def totals(self, origin: str) -> tuple[_Totals, ...]:
        return (self.all, self.own) if origin == OWN else (self.all,)

    def begin_wait(self, key: tuple[str, int], reservation: Reservation) -> None:
        if not self.waiting:
            self.all.oldest_tokens = reservation.uncached_tokens
            self.all.progress_at = reservation.reserved_at
        self.waiting[key] = reservation.uncached_tokens

    def end_wait(self, key: tuple[str, int]) -> None:
        del self.waiting[key]
        self.all.oldest_tokens = next(iter(self.waiting.values()), 0)


class _Entry:
    __slots__ = ("decoding", "reservation")

    def __init__(self, reservation: Reservation) -> None:
        self.reservation = reservation
        self.decoding = False


class LoadBook:
    """Reservations of all gateway processes, summed per replica."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._origins: dict[str, dict[int, _Entry]] = {}

    def __len__(self) -> int:
        return sum(len(entries) for entries in self._origins.values())

    def reserve(self, reservation: Reservation, origin: str = OWN) -> bool:
        """Book a reservation; False when it is booked already."""
        entries = self._origins.setdefault(origin, {})
        if reservation.id in entries:
            return False
        entries[reservation.id] = _Entry(reservation)
        replica = self._replicas.get(reservation.uid)
        if replica is None:
            replica = self._replicas[reservation.uid] = _Replica()
        key = (origin, reservation.id)
        replica.entries.add(key)
        replica.begin_wait(key, reservation)
        for totals in replica.totals(origin):
            totals.reserve(reservation)
        return True

    def first_token(self, reservation_id: int, origin: str = OWN, *, now: float = 0.0) -> Reservation | None:
        """Free the prefill part; None when it was freed before or the reservation is gone."""
        entry = self._origins.get(origin, {}).get(reservation_id)
        if entry is None or entry.decoding:
            return None
        entry.decoding = True
        replica = self._replicas[entry.reservation.uid]
        replica.end_wait((origin, reservation_id))
        replica.all.progress_at = max(replica.all.progress_at, now)
        for totals in replica.totals(origin):
            totals.first_token(entry.reservation)
        return entry.reservation

    def release(self, reservation_id: int, origin: str = OWN) -> Reservation | None:
        """Free all that is left of a reservation, from the phase it is in; None when it is gone already."""
        entries = self._origins.get(origin, {})
        entry = entries.pop(reservation_id, None)
        if entry is None:
            return None
        if not entries:
            del self._origins[origin]
        reservation = entry.reservation
        replica = self._replicas[reservation.uid]
        key = (origin, reservation_id)
        replica.entries.discard(key)
        if not entry.decoding:
            replica.end_wait(key)
        for totals in replica.totals(origin):
            totals.release(reservation, decoding=entry.decoding)
        if not replica.entries:
            del self._replicas[reservation.uid]
        return reservation

    def drop_replica(self, uid: str) -> list[tuple[str, Reservation]]:
        """Release everything on a replica that is gone or began anew; returns origins and reservations."""
        replica = self._replicas.get(uid)
        keys = sorted(replica.entries) if replica is not None else []
        released = [(origin, self.release(reservation_id, origin)) for origin, reservation_id in keys]
        return [(origin, reservation) for origin, reservation in released if reservation is not None]

    def drop_origin(self, origin: str) -> list[Reservation]:
        """Release and return everything one gateway process reserved."""
        released = [
            self.release(reservation_id, origin) for reservation_id in list(self._origins.get(origin, ()))
        ]
        return [reservation for reservation in released if reservation is not None]

    def sum_origin(self, origin: str) -> dict[str, tuple[int, int, int]]:
        """Per replica what one origin reserved: (queued tokens, KV blocks, open requests)."""
        sums: dict[str, tuple[int, int, int]] = {}
        for entry in self._origins.get(origin, {}).values():
            reservation = entry.reservation
            queued, blocks, num_open = sums.get(reservation.uid, (0, 0, 0))
            queued += 0 if entry.decoding else reservation.uncached_tokens
            sums[reservation.uid] = (queued, blocks + reservation.kv_blocks, num_open + 1)
        return sums

    def live(self, uid: str) -> Load:
        """Sums of one replica as they are counted: read at once, not kept."""
        replica = self._replicas.get(uid)
        return _NO_LOAD if replica is None else replica.all

    def scale_own(self, uid: str, num_gateways: int) -> Load:
        """What this process alone reserved, as if every other gateway carried the same."""
        replica = self._replicas.get(uid)
        if replica is None:
            return _NO_LOAD
        own = replica.own
        return Load(
            own.queued_tokens * num_gateways,
            own.output_tokens * num_gateways,
            own.kv_blocks,
            own.decoding_blocks * num_gateways,
        )

    def view(self, uid: str) -> ReplicaLoad:
        """Sums of one replica; zeros when nothing is reserved on it."""
        replica = self._replicas.get(uid)
        return _EMPTY if replica is None else _make_view(replica, replica.all)

    def own_view(self, uid: str) -> ReplicaLoad:
        """Sums of what this process alone reserved."""
        replica = self._replicas.get(uid)
        return _EMPTY if replica is None else _make_view(replica, replica.own)


_EMPTY: Final = ReplicaLoad(0, 0, 0, 0, 0, 0, 0)
_NO_LOAD: Final = Load()


def _make_view(replica: _Replica, totals: _Totals) -> ReplicaLoad:
    return ReplicaLoad(
        totals.queued_tokens,
        totals.output_tokens,
        totals.kv_blocks,
        totals.decoding_blocks,
        totals.num_prefilling,
        totals.num_decoding,
        replica.own.num_prefilling + replica.own.num_decoding,
    )
