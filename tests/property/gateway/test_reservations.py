"""Reservations are never negative and always conserved, whatever the order of events."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from millpond_gateway.routing.load import LoadBook
from millpond_gateway.routing.records import ReplicaLoad, Reservation

REPLICAS = ("u0", "u1", "u2")
ORIGINS = ("", "a", "b")

operations = st.one_of(
    st.tuples(
        st.just("reserve"),
        st.sampled_from(ORIGINS),
        st.integers(0, 15),
        st.sampled_from(REPLICAS),
        st.integers(0, 5000),
    ),
    st.tuples(st.sampled_from(["first", "release"]), st.sampled_from(ORIGINS), st.integers(0, 15)),
    st.tuples(st.just("drop_replica"), st.sampled_from(REPLICAS)),
    st.tuples(st.just("drop_origin"), st.sampled_from(ORIGINS)),
)


class Model:
    """The truth: a plain dictionary of what is open."""

    def __init__(self) -> None:
        self.open: dict[tuple[str, int], tuple[Reservation, bool]] = {}

    def apply(self, book: LoadBook, operation: tuple) -> None:  # type: ignore[type-arg]
        kind, *arguments = operation
        getattr(self, kind)(book, *arguments)

    def reserve(self, book: LoadBook, origin: str, number: int, uid: str, tokens: int) -> None:
        reservation = Reservation(
            id=number,
            request_id="",
            uid=uid,
            epoch=None,
            uncached_tokens=tokens,
            cached_tokens=0,
            kv_blocks=tokens // 16,
            output_tokens=tokens // 3,
            reserved_at=0.0,
        )
        assert book.reserve(reservation, origin) is ((origin, number) not in self.open)
        self.open.setdefault((origin, number), (reservation, False))

    def first(self, book: LoadBook, origin: str, number: int) -> None:
        reservation, decoding = self.open.get((origin, number), (None, True))
        assert (book.first_token(number, origin) is not None) is (reservation is not None and not decoding)
        if reservation is not None:
            self.open[origin, number] = (reservation, True)

    def release(self, book: LoadBook, origin: str, number: int) -> None:
        assert (book.release(number, origin) is not None) is ((origin, number) in self.open)
        self.open.pop((origin, number), None)

    def drop_replica(self, book: LoadBook, uid: str) -> None:
        gone = {key for key, (reservation, _) in self.open.items() if reservation.uid == uid}
        assert {(origin, reservation.id) for origin, reservation in book.drop_replica(uid)} == gone
        for key in gone:
            del self.open[key]

    def drop_origin(self, book: LoadBook, origin: str) -> None:
        gone = [key for key in self.open if key[0] == origin]
        assert len(book.drop_origin(origin)) == len(gone)
        for key in gone:
            del self.open[key]

    def view(self, uid: str, *, own: bool) -> ReplicaLoad:
        entries = [
            (reservation, decoding)
            for (origin, _), (reservation, decoding) in self.open.items()
            if reservation.uid == uid and (not own or origin == "")
        ]
        mine = sum(origin == "" and entry[0].uid == uid for (origin, _), entry in self.open.items())
        return ReplicaLoad(
            sum(reservation.uncached_tokens for reservation, decoding in entries if not decoding),
            sum(reservation.output_tokens for reservation, _ in entries),
            sum(reservation.kv_blocks for reservation, _ in entries),
            sum(reservation.kv_blocks for reservation, decoding in entries if decoding),
            sum(not decoding for _, decoding in entries),
            sum(decoding for _, decoding in entries),
            mine,
        )


@settings(max_examples=200, deadline=None)
@given(st.lists(operations, max_size=80))
def test_sums_equal_the_open_reservations_after_every_step(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    book, model = LoadBook(), Model()
    for step in steps:
        model.apply(book, step)
        for uid in REPLICAS:
            view = book.view(uid)
            assert view == model.view(uid, own=False)
            assert book.own_view(uid) == model.view(uid, own=True)
            load = book.live(uid)
            assert (
                0
                <= load.remaining_tokens(1000.0, 99.0)
                <= load.remaining_tokens(1000.0, 0.0)
                == view.queued_tokens
            )
            assert min(view.queued_tokens, view.output_tokens, view.kv_blocks, view.num_prefilling) >= 0
        assert len(book) == len(model.open)
