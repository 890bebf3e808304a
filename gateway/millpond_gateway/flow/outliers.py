"""Outlier ejection: which replicas fail, judged over clients, so that one client's faults eject nobody.

A fault is a connection failure, a reset, a timeout or a 5xx that is no overload answer. Overload answers are
load, and client errors are no evidence in either direction. At most 30 % of a pool is ejected; past that routing
goes on by load and the pool's condition says so.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from enum import StrEnum
from typing import Final

from millpond_gateway.flow.records import OutlierSettings, OutlierVerdict


class Evidence(StrEnum):
    """What one finished attempt says about its replica."""

    SUCCESS = "Success"
    FAULT = "Fault"
    OVERLOAD = "Overload"
    CLIENT_ERROR = "ClientError"


def classify_status(status: int, *, retry_after: bool) -> Evidence:
    """Evidence in an HTTP status; `retry_after`: the answer names when to come again."""
    if status == 429 or (status == 503 and retry_after):
        return Evidence.OVERLOAD
    if status >= 500:
        return Evidence.FAULT
    return Evidence.CLIENT_ERROR if status >= 400 else Evidence.SUCCESS


_MAX_EVENTS: Final = 256
_HALF_OPEN_CLIENTS: Final = 2


class _Events:
    """The newest attempts: when, whose, and whether it was a fault.

    In arrays made once: objects of their own, made during a burst and kept, would keep its memory.
    """

    __slots__ = ("_clients", "_count", "_faults", "_next", "_times")

    def __init__(self) -> None:
        self._times = array("d", bytes(8 * _MAX_EVENTS))
        self._clients = array("q", bytes(8 * _MAX_EVENTS))
        self._faults = bytearray(_MAX_EVENTS)
        self._next = self._count = 0

    def append(self, now: float, client: str, fault: bool) -> None:
        position = self._next
        self._times[position] = now
        self._clients[position] = hash(client)  # only told apart, never named
        self._faults[position] = fault
        self._next = (position + 1) % _MAX_EVENTS
        self._count = min(self._count + 1, _MAX_EVENTS)

    def clear(self) -> None:
        self._next = self._count = 0

    def count_clients(self) -> int:
        return len(set(self._clients[: self._count]))

    def count_since(self, since: float) -> int:
        return sum(1 for position in range(self._count) if self._times[position] >= since)

    def list_faults(self, since: float) -> list[int]:
        """Clients of the faults since then, one entry per fault."""
        return [
            self._clients[position]
            for position in range(self._count)
            if self._faults[position] and self._times[position] >= since
        ]


class _Replica:
    __slots__ = ("ejected_until", "events", "num_ejections", "probing", "relapsed")

    def __init__(self) -> None:
        self.events = _Events()
        self.ejected_until: float | None = None
        self.num_ejections = 0
        self.probing = False
        self.relapsed = False  # a probe failed, or faults came while half-open


class OutlierBook:
    """Evidence about one pool's replicas and the breaker of each: closed, open, half-open."""

    def __init__(self, settings: OutlierSettings | None = None) -> None:
        self._settings = settings or OutlierSettings()
        self._replicas: dict[str, _Replica] = {}

    def note(self, uid: str, evidence: Evidence, *, client: str, now: float) -> None:
        """Take one attempt's evidence. `client` is the tenant, or the peer address without one."""
        if evidence in {Evidence.OVERLOAD, Evidence.CLIENT_ERROR}:
            return
        replica = self._replicas.setdefault(uid, _Replica())
        fault = evidence is Evidence.FAULT
        replica.events.append(now, client, fault)
        if replica.probing:
            if not fault:
                _close(replica)
            elif replica.events.count_clients() >= _HALF_OPEN_CLIENTS:
                replica.relapsed = True

    def note_probe(self, uid: str, *, ok: bool) -> None:
        """Take the result of the gateway's own probe: it stands for every client."""
        replica = self._replicas.setdefault(uid, _Replica())
        if ok:
            _close(replica)
        else:
            replica.relapsed = True

    def keep_only(self, uids: Iterable[str]) -> None:
        """Forget replicas that are gone."""
        present = set(uids)
        self._replicas = {uid: replica for uid, replica in self._replicas.items() if uid in present}

    def decide(self, uids: Iterable[str], now: float) -> OutlierVerdict:
        """Who of `uids`, the pool's ready replicas, is out at `now`."""
        present = list(uids)
        allowed = len(present) * self._settings.max_ejected_percent // 100
        known = {uid: self._replicas[uid] for uid in present if uid in self._replicas}
        for replica in known.values():
            self._end_ejection(replica, now)
        out = {uid for uid, replica in known.items() if replica.ejected_until is not None}
        failing = [uid for uid in known if uid not in out and self._is_failing(known[uid], now)]
        failing.sort(key=lambda uid: (-len(self._faults(known[uid], now)), uid))
        chosen = failing[: max(allowed - len(out), 0)]
        for uid in chosen:
            self._eject(known[uid], now)
        return OutlierVerdict(
            ejected=frozenset(out.union(chosen)),
            probing=frozenset(uid for uid, replica in known.items() if replica.probing),
            suspects=frozenset(
                uid for uid, replica in known.items() if uid not in out and self._is_suspect(replica, now)
            ),
            capped=len(failing) > len(chosen),
        )

    def _is_failing(self, replica: _Replica, now: float) -> bool:
        if replica.relapsed:
            return True
        clients = set(self._faults(replica, now))
        return self._is_suspect(replica, now) and len(clients) >= self._settings.min_clients

    def _is_suspect(self, replica: _Replica, now: float) -> bool:
        if replica.probing:
            return False
        num_faults = len(self._faults(replica, now))
        num_recent = replica.events.count_since(now - self._settings.window_seconds)
        enough = num_faults >= self._settings.min_faults
        return enough and num_faults * 100 >= num_recent * self._settings.fault_percent

    def _eject(self, replica: _Replica, now: float) -> None:
        seconds = self._settings.first_ejection_seconds * 2 ** min(replica.num_ejections, 10)
        replica.ejected_until = now + min(seconds, self._settings.max_ejection_seconds)
        replica.num_ejections += 1
        replica.probing = False
        replica.relapsed = False
        replica.events.clear()

    def _end_ejection(self, replica: _Replica, now: float) -> None:
        if replica.ejected_until is not None and now >= replica.ejected_until:
            replica.ejected_until = None
            replica.probing = True

    def _faults(self, replica: _Replica, now: float) -> list[int]:
        """Clients of the recent faults, one entry per fault."""
        return replica.events.list_faults(now - self._settings.window_seconds)


def _close(replica: _Replica) -> None:
    replica.ejected_until = None
    replica.probing = False
    replica.relapsed = False
    replica.num_ejections = 0
    replica.events.clear()
