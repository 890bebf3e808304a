from __future__ import annotations

import msgspec
import pytest
from tests.support.routing import make_cold, make_endpoints, make_router, place

from millpond_gateway.routing.load import LoadBook
from millpond_gateway.routing.records import ReplicaLoad, Reservation
from millpond_gateway.routing.splitmix import SplitMix

_EMPTY = ReplicaLoad(0, 0, 0, 0, 0, 0, 0)


def make_reservation(number: int, uid: str = "u0", tokens: int = 100) -> Reservation:
    return Reservation(
        id=number,
        request_id=f"r{number}",
        uid=uid,
        epoch=None,
        uncached_tokens=tokens,
        cached_tokens=0,
        kv_blocks=10,
        output_tokens=50,
        reserved_at=0.0,
    )


def test_gw_057_the_first_chunk_frees_the_prefill_part() -> None:
    book = LoadBook()
    book.reserve(make_reservation(1))
    assert book.first_token(1) is not None
    view = book.view("u0")
    assert (view.queued_tokens, view.num_prefilling, view.num_decoding) == (0, 0, 1)
    assert (view.kv_blocks, view.output_tokens) == (10, 50)
    assert book.first_token(1) is None


def test_gw_055_a_request_that_dies_before_its_first_token_is_freed_from_that_phase() -> None:
    book = LoadBook()
    for number in range(100):
        book.reserve(make_reservation(number))
        assert book.release(number) is not None
    assert book.view("u0") == _EMPTY


def test_gw_056_error_and_cancel_in_one_tick_release_once() -> None:
    book = LoadBook()
    book.reserve(make_reservation(1))
    book.reserve(make_reservation(2))
    assert book.release(1) is not None
    assert book.release(1) is None
    view = book.view("u0")
    assert (view.queued_tokens, view.num_prefilling) == (100, 1)


def test_a_reservation_is_booked_once() -> None:
    book = LoadBook()
    assert book.reserve(make_reservation(1))
    assert not book.reserve(make_reservation(1))
    assert book.view("u0").queued_tokens == 100


def test_gw_054_random_aborts_leave_the_truth_and_no_memory() -> None:
    book = LoadBook()
    generator = SplitMix(1)
    open_ids: list[int] = []
    for number in range(100_000):
        book.reserve(make_reservation(number, f"u{number % 8}", 1 + number % 97))
        open_ids.append(number)
        if generator.below(2):
            book.first_token(open_ids[generator.below(len(open_ids))])
        while len(open_ids) > 200 or (open_ids and generator.below(3) == 0):
            position = generator.below(len(open_ids))
            open_ids[position], open_ids[-1] = open_ids[-1], open_ids[position]
            assert book.release(open_ids.pop()) is not None
    counted = sum(view.num_prefilling + view.num_decoding for view in (book.view(f"u{n}") for n in range(8)))
    assert counted == len(open_ids) == len(book)
    for number in open_ids:
        book.release(number)
    assert all(book.view(f"u{n}") == _EMPTY for n in range(8))
    assert len(book) == 0


def test_gw_017_long_generations_leave_no_drift() -> None:
    router = make_router(4)
    shares = dict.fromkeys((f"u{n}" for n in range(4)), 0)
    open_now: list[tuple[float, int]] = []
    for number in range(72 * 60):  # one request a minute for three days, ten minutes each
        now = number * 60.0
        while open_now and open_now[0][0] <= now:
            router.release(open_now.pop(0)[1])
        reservation = place(router, make_cold(number, 3000, expected_output_tokens=2000), now)
        router.first_token(reservation.id, now + 1.0)
        shares[reservation.uid] += 1
        open_now.append((now + 600.0, reservation.id))
    mean = sum(shares.values()) / 4
    assert all(abs(share - mean) <= 0.1 * mean for share in shares.values())
    for _, reservation_id in open_now:
        router.release(reservation_id)
    assert all(router.load.view(uid) == _EMPTY for uid in shares)


def test_a_dropped_replica_names_what_was_open_on_it() -> None:
    book = LoadBook()
    book.reserve(make_reservation(1))
    book.reserve(make_reservation(1, "u0"), origin="peer")
    book.reserve(make_reservation(2, "u1"))
    assert [(origin, r.id) for origin, r in book.drop_replica("u0")] == [("", 1), ("peer", 1)]
    assert len(book) == 1


def test_own_view_leaves_peers_out() -> None:
    book = LoadBook()
    book.reserve(make_reservation(1))
    book.reserve(make_reservation(1), origin="peer")
    assert book.view("u0").queued_tokens == 200
    assert book.own_view("u0").queued_tokens == 100
    assert book.view("u0").num_own_open == 1
    assert book.sum_origin("peer") == {"u0": (100, 10, 1)}
    assert [r.id for r in book.drop_origin("peer")] == [1]


def test_unused_endpoints_cost_nothing() -> None:
    assert LoadBook().view(make_endpoints(1)[0].uid) == _EMPTY


def test_a_prompt_in_prefill_counts_for_what_is_left_of_it() -> None:
    book = LoadBook()
    load = book.live("u0")
    assert load.remaining_tokens(1000.0, 9.0) == 0
    book.reserve(msgspec.structs.replace(make_reservation(1, tokens=4000), reserved_at=1.0))
    book.reserve(msgspec.structs.replace(make_reservation(2, tokens=500), reserved_at=2.0), origin="peer")
    load = book.live("u0")
    assert load.remaining_tokens(1000.0, 1.0) == 4500  # nothing is done in no time
    assert load.remaining_tokens(1000.0, 3.0) == 2500
    assert load.remaining_tokens(1000.0, 5.0) == 4000 / 32 + 500  # due: its first token has still to come
    assert load.remaining_tokens(1000.0, 6.0) == 1000 + 500
    assert load.remaining_tokens(1000.0, 60.0) == 4500  # late or stuck: not free
    book.first_token(1, now=4.5)
    assert load.remaining_tokens(1000.0, 4.5) == 500
    assert load.remaining_tokens(1000.0, 4.7) == pytest.approx(300)
    assert load.remaining_tokens(1000.0, 4.0) == 500  # an older clock than the last first token's


def test_work_that_comes_to_an_idle_replica_is_not_done_before_it_came() -> None:
    book = LoadBook()
    book.reserve(make_reservation(1))
    book.first_token(1, now=1.0)
    book.reserve(msgspec.structs.replace(make_reservation(2, tokens=900), reserved_at=50.0))
    assert book.live("u0").remaining_tokens(1000.0, 50.0) == 900


def test_a_cancelled_prompt_leaves_the_progress_of_the_next_one_bounded() -> None:
    book = LoadBook()
    for number, tokens in ((1, 4000), (2, 500), (3, 700)):
        book.reserve(make_reservation(number, tokens=tokens))
    book.release(1)
    assert book.live("u0").remaining_tokens(1000.0, 0.1) == pytest.approx(1100)
    assert book.live("u0").remaining_tokens(1000.0, 3.0) == 1200
    book.release(2)
    assert book.live("u0").remaining_tokens(1000.0, 0.1) == pytest.approx(600)
    book.release(3)
    assert book.live("u0").remaining_tokens(1000.0, 9.0) == 0
