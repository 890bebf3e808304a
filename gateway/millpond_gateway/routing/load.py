"""Load of every replica from reservations: booked before send, prefill freed at the first chunk, rest once.

A reservation is known by (origin, id): origin is the gateway process that made it, "" is this one. Counters
are integers, so millions of reservations leave no drift behind.
"""

from __future__ import annotations

from millpond_gateway.routing.records import ReplicaLoad, Reservation

OWN = ""


class _Totals:
    __slots__ = ("kv_blocks", "num_decoding", "num_prefilling", "output_tokens", "queued_tokens")

    def __init__(self) -> None:
        self.queued_tokens = 0
        self.output_tokens = 0
        self.kv_blocks = 0
        self.num_prefilling = 0
        self.num_decoding = 0

    def book(self, reservation: Reservation, sign: int) -> None:
        self.output_tokens += sign * reservation.output_tokens
        self.kv_blocks += sign * reservation.kv_blocks

    def book_prefill(self, reservation: Reservation, sign: int) -> None:
        self.queued_tokens += sign * reservation.uncached_tokens
        self.num_prefilling += sign


class _Replica:
    __slots__ = ("all", "entries", "own")

    def __init__(self) -> None:
        self.all = _Totals()
        self.own = _Totals()
        self.entries: set[tuple[str, int]] = set()


class _Entry:
    __slots__ = ("decoding", "reservation")

    def __init__(self, reservation: Reservation) -> None:
        self.reservation = reservation
        self.decoding = False


class LoadBook:
    """Reservations of all gateway processes, summed per replica."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._entries: dict[tuple[str, int], _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def reserve(self, reservation: Reservation, origin: str = OWN) -> bool:
        """Book a reservation; False when it is booked already."""
        key = (origin, reservation.id)
        if key in self._entries:
            return False
        self._entries[key] = _Entry(reservation)
        replica = self._replicas.setdefault(reservation.uid, _Replica())
        replica.entries.add(key)
        for totals in self._totals(replica, origin):
            totals.book(reservation, 1)
            totals.book_prefill(reservation, 1)
        return True

    def first_token(self, reservation_id: int, origin: str = OWN) -> Reservation | None:
        """Free the prefill part; None when it was freed before or the reservation is gone."""
        entry = self._entries.get((origin, reservation_id))
        if entry is None or entry.decoding:
            return None
        entry.decoding = True
        replica = self._replicas[entry.reservation.uid]
        for totals in self._totals(replica, origin):
            totals.book_prefill(entry.reservation, -1)
            totals.num_decoding += 1
        return entry.reservation

    def release(self, reservation_id: int, origin: str = OWN) -> Reservation | None:
        """Free all that is left of a reservation, from the phase it is in; None when it is gone already."""
        entry = self._entries.pop((origin, reservation_id), None)
        if entry is None:
            return None
        reservation = entry.reservation
        replica = self._replicas[reservation.uid]
        replica.entries.discard((origin, reservation_id))
        for totals in self._totals(replica, origin):
            totals.book(reservation, -1)
            if entry.decoding:
                totals.num_decoding -= 1
            else:
                totals.book_prefill(reservation, -1)
        if not replica.entries:
            del self._replicas[reservation.uid]
        return reservation

    def drop_replica(self, uid: str) -> int:
        """Release everything on a replica that is gone or began anew; returns how many reservations."""
        replica = self._replicas.get(uid)
        entries = sorted(replica.entries) if replica is not None else []
        for origin, reservation_id in entries:
            self.release(reservation_id, origin)
        return len(entries)

    def drop_origin(self, origin: str) -> int:
        """Release everything one gateway process reserved; returns how many reservations."""
        keys = [key for key in self._entries if key[0] == origin]
        for _, reservation_id in keys:
            self.release(reservation_id, origin)
        return len(keys)

    def queued_tokens(self, uid: str) -> int:
        """Uncached prompt tokens reserved on the replica whose first token has not come."""
        replica = self._replicas.get(uid)
        return 0 if replica is None else replica.all.queued_tokens

    def view(self, uid: str) -> ReplicaLoad:
        """Sums of one replica; zeros when nothing is reserved on it."""
        return self._view(uid, own=False)

    def own_view(self, uid: str) -> ReplicaLoad:
        """Sums of what this process alone reserved."""
        return self._view(uid, own=True)

    def _view(self, uid: str, *, own: bool) -> ReplicaLoad:
        replica = self._replicas.get(uid)
        if replica is None:
            return ReplicaLoad(uid, 0, 0, 0, 0, 0, 0)
        totals = replica.own if own else replica.all
        return ReplicaLoad(
            uid,
            totals.queued_tokens,
            totals.output_tokens,
            totals.kv_blocks,
            totals.num_prefilling,
            totals.num_decoding,
            replica.own.num_prefilling + replica.own.num_decoding,
        )

    @staticmethod
    def _totals(replica: _Replica, origin: str) -> tuple[_Totals, ...]:
        return (replica.all, replica.own) if origin == OWN else (replica.all,)
