"""Shared decisions: every gateway process books what every other one decided.

A pure state machine. The transport calls `flush` every 10 ms and `heartbeat` every second and sends both to
all peers, hands every received message to `receive` and sends back what that returns, and calls `expire` now and
then. Applying is ordered per origin and idempotent: duplicates change nothing, a gap asks for the missing
range, an unknown epoch drops what the origin's former life reserved, silence past the lease drops all it
reserved, since its streams died with it. Memory is bounded: the log by bytes, the rest by open reservations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final, NamedTuple

from millpond_gateway.routing.records import Reservation, TenantHolds
from millpond_gateway.routing.router import Router
from millpond_gateway.routing.wire import (
    BATCH_BYTES,
    AskRange,
    Batch,
    Decision,
    Digest,
    FirstToken,
    ForeignOriginError,
    FullState,
    Held,
    Message,
    OpenReservation,
    Release,
    ReplicaSum,
    Reserve,
    decode_message,
    encode_message,
    is_of,
    make_held,
    make_reservation,
    make_reserve,
    split_batches,
    unpack_keys,
)

LEASE_SECONDS: Final = 2.0
LOG_BYTES: Final = 4 * 1024 * 1024
"""Own decisions kept for peers that missed some; older gaps are healed by the full state."""
ASK_AGAIN_SECONDS: Final = 0.2
_MAX_RETIRED_EPOCHS: Final = 8


class Outgoing(NamedTuple):
    """One message to one peer."""

    origin: str
    data: bytes


class DecisionCounts(NamedTuple):
    """What happened on the receiving side, for metrics."""

    num_applied: int
    num_duplicates: int
    num_gaps: int
    num_full_states: int
    num_expired_origins: int
    num_mismatches: int


class _Peer:
    __slots__ = ("asked_at", "epoch", "heard_at", "next_sequence", "retired", "synced")

    def __init__(self, epoch: int, now: float) -> None:
        self.epoch = epoch
        self.next_sequence = 0
        self.synced = False
        self.heard_at = now
        self.asked_at = float("-inf")
        self.retired: deque[int] = deque(maxlen=_MAX_RETIRED_EPOCHS)


class _Log:
    """Own decisions by sequence: those not sent yet, and the newest LOG_BYTES of those sent."""

    def __init__(self) -> None:
        self._sent: deque[Decision] = deque()
        self._unsent: list[Decision] = []
        self.num_bytes = 0
        self.num_sent = 0

    @property
    def first_sequence(self) -> int:
        return self.num_sent - len(self._sent)

    @property
    def next_sequence(self) -> int:
        return self.num_sent + len(self._unsent)

    def append(self, decision: Decision) -> None:
        self._unsent.append(decision)

    def take_unsent(self) -> list[Decision]:
        taken, self._unsent = self._unsent, []
        self._sent.extend(taken)
        self.num_sent += len(taken)
        self.num_bytes += sum(decision.num_bytes for decision in taken)
        while self.num_bytes > LOG_BYTES:
            self.num_bytes -= self._sent.popleft().num_bytes
        return taken

    def sent_since(self, sequence: int) -> list[Decision]:
        return list(islice(self._sent, max(sequence - self.first_sequence, 0), None))


class SharedDecisions:
    """This process's own decisions going out, and its peers' coming in."""

    def __init__(self, *, origin: str, epoch: int, lease_seconds: float = LEASE_SECONDS) -> None:
        if not origin:
            raise ValueError("an origin needs a name; use the pod name and the process number")
        self.origin = origin
        self.epoch = epoch
        self._lease_seconds = lease_seconds
        self._routers: dict[str, Router] = {}
        self._log = _Log()
        self._open: dict[tuple[str, int], tuple[Reserve, bool]] = {}
        self._holds: dict[str, Held] = {}
        self._changed_holds: set[str] = set()
        self._peers: dict[str, _Peer] = {}
        self._num_applied = 0
        self._num_duplicates = 0
        self._num_gaps = 0
        self._num_full_states = 0
        self._num_expired = 0
        self._num_mismatches = 0

    @property
    def counts(self) -> DecisionCounts:
        """Counters since start."""
        return DecisionCounts(
            self._num_applied,
            self._num_duplicates,
            self._num_gaps,
            self._num_full_states,
            self._num_expired,
            self._num_mismatches,
        )

    @property
    def num_log_bytes(self) -> int:
        """Bytes of own decisions kept for repair."""
        return self._log.num_bytes

    def attach(self, router: Router) -> None:
        """Share a pool's decisions from now on."""
        self._routers[router.pool] = router
        router.set_sink(self)
        for peer in self._peers.values():
            peer.synced = False  # what peers reserved in this pool before is in their full state

    def detach(self, pool: str) -> None:
        """Stop sharing a pool that is gone."""
        router = self._routers.pop(pool, None)
        if router is not None:
            router.set_sink(None)
        for key in [key for key in self._open if key[0] == pool]:
            self.release(*key)
        self._holds.pop(pool, None)
        self._changed_holds.discard(pool)

    # Own decisions, called by the routers.

    def reserve(self, pool: str, reservation: Reservation, keys: Sequence[int]) -> None:
        """Tell peers of a reservation."""
        decision = make_reserve(pool, reservation, keys)
        self._open[pool, reservation.id] = (make_reserve(pool, reservation, ()), False)
        self._log.append(decision)

    def first_token(self, pool: str, reservation_id: int) -> None:
        """Tell peers that the prefill part is free."""
        reserve, _ = self._open.get((pool, reservation_id), (None, False))
        if reserve is not None:
            self._open[pool, reservation_id] = (reserve, True)
            self._log.append(FirstToken(pool, reservation_id))

    def release(self, pool: str, reservation_id: int, used_tokens: int | None = None) -> None:
        """Tell peers that the reservation ended, and what it used."""
        if self._open.pop((pool, reservation_id), None) is not None:
            self._log.append(Release(pool, reservation_id, used_tokens))

    def hold(self, pool: str, num_held: int, tokens: int, holds: TenantHolds) -> None:
        """Tell peers what is held here; only the newest of a batch goes out."""
        self._holds[pool] = make_held(pool, num_held, tokens, holds)
        self._changed_holds.add(pool)

    # To the peers.

    def flush(self) -> list[bytes]:
        """Batches with all decisions since the last flush, for every peer."""
        for pool in sorted(self._changed_holds):
            self._log.append(self._holds[pool])
        self._changed_holds.clear()
        first = self._log.num_sent
        decisions = self._log.take_unsent()
        return [encode_message(batch) for batch in split_batches(self.origin, self.epoch, first, decisions)]

    def heartbeat(self) -> list[bytes]:
        """What `flush` gives, then a digest of where this process stands; for every peer, every second."""
        return [*self.flush(), encode_message(self._make_digest())]

    def _make_digest(self) -> Digest:
        sums: dict[tuple[str, str], list[int]] = {}
        for reserve, decoding in self._open.values():
            total = sums.setdefault((reserve.pool, reserve.uid), [0, 0, 0])
            total[0] += 0 if decoding else reserve.uncached_tokens
            total[1] += reserve.kv_blocks
            total[2] += 1
        records = tuple(ReplicaSum(pool, uid, *total) for (pool, uid), total in sorted(sums.items()))
        return Digest(self.origin, self.epoch, self._log.next_sequence, records)

    # From the peers.

    def receive(self, data: bytes, now: float, *, sender: tuple[str, int] | None = None) -> list[Outgoing]:
        """Apply a peer's message; returns answers and questions to send.

        `sender`: origin and epoch that the connection proved; None believes what the message says.

        Raises:
            WireError: when the message is unreadable, or another's than the sender's.
        """
        message = decode_message(data)
        if sender is not None and not is_of(message, sender):
            raise ForeignOriginError(f"a message that is not of {sender[0]} came from it")
        if isinstance(message, AskRange):
            return self._answer(message)
        if message.origin == self.origin:
            return []
        peer = self._hear(message, now)
        if peer is None:
            return []
        if isinstance(message, Batch):
            return self._apply_batch(message, peer, now)
        if isinstance(message, Digest):
            return self._check_digest(message, peer, now)
        return self._apply_full_state(message, peer, now)

    def expire(self, now: float) -> list[str]:
        """Drop the reservations of origins silent past their lease; returns those origins."""
        silent = [origin for origin, peer in self._peers.items() if now - peer.heard_at > self._lease_seconds]
        for origin in silent:
            self._drop(origin)
            del self._peers[origin]
            self._num_expired += 1
        return silent

    def num_live_peers(self) -> int:
        """Peers heard within their lease, as of the last `expire`."""
        return len(self._peers)

    def num_synced_peers(self) -> int:
        """Live peers whose state is complete here."""
        return sum(peer.synced for peer in self._peers.values())

    def _hear(self, message: Batch | Digest | FullState, now: float) -> _Peer | None:
        """The peer a message is from, its state begun anew on an unknown epoch; None for a former life's echo."""
        peer = self._peers.get(message.origin)
        if peer is None:
            peer = self._peers[message.origin] = _Peer(message.epoch, now)
        elif message.epoch in peer.retired:
            return None
        elif peer.epoch != message.epoch:
            self._drop(message.origin)
            retired = peer.retired
            retired.append(peer.epoch)
            peer = self._peers[message.origin] = _Peer(message.epoch, now)
            peer.retired = retired
        peer.heard_at = now
        return peer

    def _apply_batch(self, batch: Batch, peer: _Peer, now: float) -> list[Outgoing]:
        if not peer.synced and batch.first_sequence == 0 and peer.next_sequence == 0:
            peer.synced = True  # heard from its first decision on
        end = batch.first_sequence + len(batch.decisions)
        if peer.synced and end <= peer.next_sequence:
            self._num_duplicates += len(batch.decisions)
            return []
        if not peer.synced or batch.first_sequence > peer.next_sequence:
            self._num_gaps += 1
            return self._ask(batch.origin, peer, now)
        skipped = peer.next_sequence - batch.first_sequence
        self._num_duplicates += skipped
        for decision in batch.decisions[skipped:]:
            self._apply(batch.origin, decision, now)
        self._num_applied += len(batch.decisions) - skipped
        peer.next_sequence = end
        return []

    def _check_digest(self, digest: Digest, peer: _Peer, now: float) -> list[Outgoing]:
        if not peer.synced and digest.next_sequence == 0:
            peer.synced = True
        if not peer.synced or digest.next_sequence > peer.next_sequence:
            return self._ask(digest.origin, peer, now)
        if digest.next_sequence < peer.next_sequence:
            return []  # an old digest that overtook nothing
        if self._sums_match(digest):
            return []
        self._num_mismatches += 1
        peer.synced = False
        return self._ask(digest.origin, peer, now)

    def _sums_match(self, digest: Digest) -> bool:
        """Compare replicas that this process knows; views of pods differ for a moment, and heal by themselves."""
        told = {(entry.pool, entry.uid): _sum_of(entry) for entry in digest.sums}
        for pool, router in self._routers.items():
            booked = router.load.sum_origin(digest.origin)
            for endpoint in router.endpoints:
                uid = endpoint.uid
                if booked.get(uid, _NOTHING) != told.get((pool, uid), _NOTHING):
                    return False
        return True

    def _apply_full_state(self, state: FullState, peer: _Peer, now: float) -> list[Outgoing]:
        if peer.synced and state.next_sequence <= peer.next_sequence:
            return []
        if state.first_part:
            self._drop(state.origin)
            self._num_full_states += 1
        for entry in state.reservations:
            self._apply(state.origin, entry.reserve, now)
            if entry.decoding:
                self._apply(state.origin, FirstToken(entry.reserve.pool, entry.reserve.id), now)
        for held in state.holds:
            self._apply(state.origin, held, now)
        peer.synced = state.final
        peer.next_sequence = state.next_sequence
        return []

    def _apply(self, origin: str, decision: Decision, now: float) -> None:
        router = self._routers.get(decision.pool)
        if router is None:
            return
        if isinstance(decision, Reserve):
            reservation = make_reservation(decision, now)
            router.apply_reserve(origin, reservation, unpack_keys(decision.keys), now)
        elif isinstance(decision, Held):
            holds = TenantHolds(decision.tenants, decision.tenant_tokens, decision.claims)
            router.apply_hold(origin, decision.num_held, decision.tokens, holds)
        elif isinstance(decision, FirstToken):
            router.apply_first_token(origin, decision.id, now)
        else:
            router.apply_release(origin, decision.id, decision.used_tokens)

    def _ask(self, origin: str, peer: _Peer, now: float) -> list[Outgoing]:
        if now - peer.asked_at < ASK_AGAIN_SECONDS:
            return []
        peer.asked_at = now
        sequence = peer.next_sequence if peer.synced else -1
        return [Outgoing(origin, encode_message(AskRange(self.origin, peer.epoch, sequence)))]

    def _answer(self, ask: AskRange) -> list[Outgoing]:
        if ask.epoch != self.epoch or ask.from_sequence < self._log.first_sequence:
            return [Outgoing(ask.asker, encode_message(part)) for part in self._make_full_state()]
        decisions = self._log.sent_since(ask.from_sequence)
        batches = split_batches(self.origin, self.epoch, ask.from_sequence, decisions)
        return [Outgoing(ask.asker, encode_message(batch)) for batch in batches]

    def _make_full_state(self) -> list[Message]:
        """Parts of the full state; decisions not flushed yet are in it, and peers skip them when they come."""
        entries = [OpenReservation(reserve, decoding) for reserve, decoding in self._open.values()]
        size = max(BATCH_BYTES // 256, 1)
        starts = range(0, max(len(entries), 1), size)
        return [
            FullState(
                self.origin,
                self.epoch,
                self._log.next_sequence,
                start == 0,
                start == starts[-1],
                tuple(entries[start : start + size]),
                tuple(self._holds.values()) if start == 0 else (),
            )
            for start in starts
        ]

    def _drop(self, origin: str) -> None:
        for router in self._routers.values():
            router.drop_origin(origin)


_NOTHING: Final = (0, 0, 0)


def _sum_of(entry: ReplicaSum) -> tuple[int, int, int]:
    return entry.queued_tokens, entry.kv_blocks, entry.num_open
