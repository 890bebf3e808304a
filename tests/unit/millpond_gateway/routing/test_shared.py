from __future__ import annotations

import msgspec
import pytest
from tests.support.routing import make_cold, make_endpoints, make_keys, make_request, make_router, place

from millpond_gateway.routing.records import Reservation, TenantHolds
from millpond_gateway.routing.router import Router
from millpond_gateway.routing.settings import RoutingSettings
from millpond_gateway.routing.shared import LOG_BYTES, SharedDecisions
from millpond_gateway.routing.wire import (
    BATCH_BYTES,
    MAX_KEYS,
    MAX_MESSAGE_BYTES,
    AskRange,
    Batch,
    Held,
    Reserve,
    WireError,
    decode_message,
    encode_message,
    pack_keys,
    unpack_keys,
)


class Node:
    """One gateway process."""

    def __init__(self, name: str, epoch: int = 1, endpoints: int = 4) -> None:
        self.router: Router = make_router(endpoints, seed=len(name) + epoch)
        self.shared = SharedDecisions(origin=name, epoch=epoch)
        self.shared.attach(self.router)

    def queued(self) -> dict[str, int]:
        return {e.uid: self.router.load.view(e.uid).queued_tokens for e in self.router.endpoints}

    def hears(self, other: Node, messages: list[bytes], now: float) -> None:
        """Deliver messages, then questions and answers until both are quiet."""
        for data in messages:
            for asked in self.shared.receive(data, now):
                for answer in other.shared.receive(asked.data, now):
                    self.shared.receive(answer.data, now)


def test_every_reserve_and_release_reaches_the_peer() -> None:
    a, b = Node("a"), Node("b")
    reservations = [place(a.router, make_cold(n, 1000)) for n in range(6)]
    b.hears(a, a.shared.flush(), 0.02)
    assert b.queued() == a.queued()
    a.router.first_token(reservations[0].id, 1.0)
    a.router.release(reservations[1].id)
    b.hears(a, a.shared.flush(), 1.02)
    assert b.queued() == a.queued()
    for reservation in reservations:
        a.router.release(reservation.id)
    b.hears(a, a.shared.flush(), 2.0)
    assert set(b.queued().values()) == {0}


def test_a_shared_reserve_teaches_the_index_and_the_session() -> None:
    a, b = Node("a"), Node("b")
    keys = make_keys((1, 200))
    home = place(a.router, make_request(keys, session=9))
    b.hears(a, a.shared.flush(), 0.02)
    choice = b.router.choose(make_request([*keys, *make_keys((2, 3))], session=9), 0.1)
    assert choice.endpoint is not None
    assert choice.score is not None
    assert (choice.endpoint.uid, choice.score.cached_tokens) == (home.uid, 3200)


def test_applying_is_idempotent() -> None:
    a, b = Node("a"), Node("b")
    place(a.router, make_cold(1, 1000))
    messages = a.shared.flush()
    for _ in range(3):
        b.hears(a, messages, 0.02)
    assert b.queued() == a.queued()
    assert b.shared.counts.num_duplicates == 2


def test_a_lost_batch_is_asked_for_and_comes_in_order() -> None:
    a, b = Node("a"), Node("b")
    first = place(a.router, make_cold(1, 1000))
    b.hears(a, a.shared.flush(), 0.0)
    a.router.first_token(first.id, 0.5)
    a.shared.flush()  # lost
    a.router.release(first.id)
    place(a.router, make_cold(2, 700))
    messages = a.shared.flush()
    asked = b.shared.receive(messages[0], 1.0)
    assert isinstance(decode_message(asked[0].data), AskRange)
    for answer in a.shared.receive(asked[0].data, 1.0):
        b.shared.receive(answer.data, 1.0)
    assert b.queued() == a.queued()
    assert b.shared.counts.num_gaps == 1


def test_a_digest_shows_a_loss_that_no_batch_follows() -> None:
    a, b = Node("a"), Node("b")
    b.hears(a, a.shared.heartbeat(), 0.0)
    place(a.router, make_cold(1, 1000))
    a.shared.flush()  # lost
    b.hears(a, a.shared.heartbeat(), 1.0)
    assert b.queued() == a.queued()


def test_a_digest_repairs_a_wrong_sum() -> None:
    a, b = Node("a"), Node("b")
    reservation = place(a.router, make_cold(1, 1000))
    b.hears(a, a.shared.heartbeat(), 0.0)
    b.router.load.release(reservation.id, "a")  # as if a bug or a race had lost it
    b.hears(a, a.shared.heartbeat(), 1.0)
    assert b.queued() == a.queued()
    assert b.shared.counts.num_mismatches == 1


def test_a_late_joiner_gets_the_full_state() -> None:
    a = Node("a")
    reservations = [place(a.router, make_cold(n, 500)) for n in range(3000)]
    for reservation in reservations[:1000]:
        a.router.first_token(reservation.id, 0.5)
    a.shared.flush()
    b = Node("b")
    b.hears(a, a.shared.heartbeat(), 1.0)
    assert b.queued() == a.queued()
    assert b.router.load.sum_origin("a") == a.router.load.sum_origin("")
    a.router.release(reservations[0].id)
    b.hears(a, a.shared.flush(), 1.1)
    assert b.router.load.sum_origin("a") == a.router.load.sum_origin("")


def test_a_new_epoch_drops_the_former_life_and_its_echo() -> None:
    a, b = Node("a", epoch=1), Node("b")
    place(a.router, make_cold(1, 1000))
    old = a.shared.flush()
    b.hears(a, old, 0.0)
    reborn = Node("a", epoch=2)
    place(reborn.router, make_cold(2, 300))
    b.hears(reborn, reborn.shared.flush(), 1.0)
    assert b.queued() == reborn.queued()
    assert b.shared.receive(old[0], 1.1) == []  # delayed in the network
    assert b.queued() == reborn.queued()


def test_a_silent_origin_loses_its_lease() -> None:
    a, b = Node("a"), Node("b")
    place(a.router, make_cold(1, 1000))
    b.hears(a, a.shared.heartbeat(), 0.0)
    assert b.shared.expire(1.9) == []
    assert b.shared.num_live_peers() == 1
    assert b.shared.expire(2.1) == ["a"]
    assert set(b.queued().values()) == {0}
    b.hears(a, a.shared.heartbeat(), 3.0)  # it was only unreachable
    assert b.queued() == a.queued()
    assert b.shared.num_synced_peers() == 1


def test_a_dropped_replica_is_released_at_the_peers() -> None:
    a, b = Node("a"), Node("b")
    gone = place(a.router, make_cold(1, 1000)).uid
    b.hears(a, a.shared.flush(), 0.0)
    a.router.update_endpoints([e for e in make_endpoints(4) if e.uid != gone])
    b.hears(a, a.shared.flush(), 0.1)
    assert set(b.queued().values()) == {0}


def test_a_reserve_on_an_engines_former_life_is_not_booked() -> None:
    a, b = Node("a"), Node("b")
    for node in (a, b):
        node.router.update_endpoints(make_endpoints(1, epoch="aa"))
    b.router.note_epoch("u0", "bb")
    place(a.router, make_cold(1, 1000))
    b.hears(a, a.shared.flush(), 0.0)
    assert b.queued() == {"u0": 0}


def test_gw_093_a_day_of_gossip_leaves_bounded_state() -> None:
    a, b = Node("a"), Node("b")
    for number in range(3000):
        reservation = place(a.router, make_request(make_keys((number % 50, 400)), tokens=6401), number * 0.1)
        a.router.first_token(reservation.id, number * 0.1)
        a.router.release(reservation.id)
        if number % 10 == 9:
            b.hears(a, a.shared.heartbeat(), number * 0.1)
    assert a.shared.num_log_bytes <= LOG_BYTES
    assert len(b.router.load) == 0
    assert b.router.load.sum_origin("a") == {}


def test_a_gap_older_than_the_log_is_healed_by_the_full_state() -> None:
    a, b = Node("a"), Node("b")
    b.hears(a, a.shared.heartbeat(), 0.0)
    kept = place(a.router, make_cold(1, 900))
    for number in range(1200):
        reservation = place(a.router, make_request(make_keys((number % 9, 600)), tokens=9601), 1.0)
        a.router.release(reservation.id)
        if number % 100 == 0:
            a.shared.flush()  # all lost
    b.hears(a, a.shared.heartbeat(), 2.0)
    assert b.queued() == a.queued()
    assert b.queued()[kept.uid] == 900
    assert b.shared.counts.num_full_states == 1


def test_batches_are_cut_to_size() -> None:
    a = Node("a")
    for number in range(40):
        place(a.router, make_request(make_keys((number, 2000)), tokens=32_001))
    batches = a.shared.flush()
    assert len(batches) > 1
    assert all(len(batch) <= BATCH_BYTES + 8 * MAX_KEYS for batch in batches)
    read = [decode_message(batch) for batch in batches]
    assert sum(len(batch.decisions) for batch in read if isinstance(batch, Batch)) == 40


def test_keys_are_cut_and_ragged_bytes_survive() -> None:
    assert list(unpack_keys(pack_keys([1, (1 << 64) - 1]))) == [1, (1 << 64) - 1]
    assert len(unpack_keys(pack_keys(list(range(MAX_KEYS + 5))))) == MAX_KEYS
    assert list(unpack_keys(b"\x01" + bytes(7) + b"xyz")) == [1]


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\xa1Z\x01\x02", bytes(MAX_MESSAGE_BYTES + 1)])
def test_an_unreadable_message_is_a_typed_error(data: bytes) -> None:
    with pytest.raises(WireError):
        Node("a").shared.receive(data, 0.0)


def test_peers_requests_are_told_to_the_observer() -> None:
    class Observer:
        def __init__(self) -> None:
            self.open: list[tuple[str, int]] = []

        def peer_reserved(self, reservation: Reservation) -> None:
            self.open.append((reservation.tenant, reservation.id))

        def peer_released(self, reservation: Reservation, used_tokens: int | None = None) -> None:
            self.open.remove((reservation.tenant, reservation.id))

        def peer_held(self, origin: str, num_held: int, tokens: int, holds: TenantHolds) -> None: ...

    a, b = Node("a"), Node("b")
    observer = Observer()
    b.router.set_observer(observer)
    reservations = [place(a.router, make_cold(n, 100, tenant="acme")) for n in range(3)]
    b.hears(a, a.shared.flush(), 0.0)
    assert len(observer.open) == 3
    a.router.release(reservations[0].id)
    b.hears(a, a.shared.flush(), 0.1)
    assert observer.open == [("acme", 2), ("acme", 3)]
    b.shared.expire(10.0)
    assert observer.open == []


def test_an_origin_needs_a_name() -> None:
    with pytest.raises(ValueError, match="name"):
        SharedDecisions(origin="", epoch=1)


def test_what_a_full_state_contained_is_skipped_in_the_batch_that_follows() -> None:
    a, b = Node("a"), Node("b")
    place(a.router, make_cold(0, 500))
    a.shared.flush()  # lost before b came
    for number in range(3):
        place(a.router, make_cold(1 + number, 500))  # decided, not sent yet
    ask = encode_message(AskRange("b", 1, -1))
    for answer in a.shared.receive(ask, 0.0):
        b.shared.receive(answer.data, 0.0)
    assert b.queued() == a.queued()
    place(a.router, make_cold(9, 500))
    b.hears(a, a.shared.flush(), 0.1)
    assert b.queued() == a.queued()
    assert (b.shared.counts.num_duplicates, b.shared.counts.num_applied) == (3, 1)


def test_what_is_held_is_told_with_the_next_batch_and_in_the_full_state_and_dies_with_its_origin() -> None:
    told: dict[str, tuple[int, int]] = {}

    class Observer:
        def peer_reserved(self, reservation: Reservation) -> None: ...

        def peer_released(self, reservation: Reservation, used_tokens: int | None = None) -> None: ...

        def peer_held(self, origin: str, num_held: int, tokens: int, holds: TenantHolds) -> None:
            told[origin] = (num_held, tokens)

    here, there, late = (SharedDecisions(origin=name, epoch=number) for number, name in enumerate("abc"))
    own = Router("p", RoutingSettings(), seed=1)
    here.attach(own)
    for shared in (there, late):
        router = Router("p", RoutingSettings(), seed=1)
        router.set_observer(Observer())
        shared.attach(router)
    for num_held in (1, 2, 3):
        own.note_held(num_held, 100 * num_held, TenantHolds)
    messages = here.flush()
    assert len(messages) == 1
    there.receive(messages[0], 0.0)
    assert told.pop("a") == (3, 300)
    own.note_held(3, 300, TenantHolds)
    assert here.flush() == []  # nothing new
    own.note_held(4, 400, TenantHolds)
    here.flush()
    (question,) = late.receive(here.heartbeat()[-1], 0.0)
    for answer in here.receive(question.data, 0.0):
        late.receive(answer.data, 0.0)
    assert told.pop("a") == (4, 400)
    late.expire(100.0)
    assert told.pop("a") == (0, 0)


def test_gateways_of_the_former_version_read_our_messages_and_we_theirs() -> None:
    """While gateways are replaced one by one, fields that only one side knows are left out or empty."""
    ours = Reserve("p", 1, "u", None, 10, 0, 1, 5, None, "acme", 16.0, b"", 77)
    batch = msgspec.msgpack.decode(encode_message(Batch("a", 1, 0, (ours, Held("p", 1, 9, {"acme": 1})))))
    (reserve, held) = batch[4]
    assert len(reserve) == 14
    former = [*batch[:4], [reserve[:13], held[:5]]]
    read = decode_message(msgspec.msgpack.encode(former))
    assert isinstance(read, Batch)
    assert read.decisions == (
        Reserve("p", 1, "u", None, 10, 0, 1, 5, None, "acme", 16.0, b""),
        Held("p", 1, 9, {"acme": 1}, {}, {}),
    )
    assert decode_message(msgspec.msgpack.encode([*batch[:4], [[*reserve, "new"], [*held, "new"]]])) == Batch(
        "a", 1, 0, (ours, Held("p", 1, 9, {"acme": 1}))
    )
