"""What a gateway counts of each revision."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millpond_common.contract.gateway_report import RevisionReport
from millpond_gateway.flow.outliers import Evidence
from millpond_gateway.flow.trials import TrialBook


def make_book(**revisions: str) -> TrialBook:
    book = TrialBook()
    book.set_endpoints(revisions)
    return book


def test_revisions_are_counted_apart() -> None:
    book = make_book(a="new", b="new", c="old")
    for evidence in (Evidence.SUCCESS, Evidence.SUCCESS, Evidence.OVERLOAD, Evidence.CLIENT_ERROR):
        book.note_attempt("a", evidence)
    book.note_attempt("b", Evidence.SUCCESS)
    book.note_attempt("b", Evidence.FAULT)
    book.note_attempt("c", Evidence.SUCCESS)
    book.note_first_token("a", 0.0005)
    book.note_first_token("b", 0.0005)
    assert book.report() == (
        RevisionReport("new", 4, 1, ((1, 2),)),
        RevisionReport("old", 1, 0),
    )


def test_a_revision_whose_replicas_are_gone_is_forgotten() -> None:
    book = make_book(a="new", c="old")
    book.note_attempt("a", Evidence.SUCCESS)
    book.note_attempt("c", Evidence.FAULT)
    book.set_endpoints({"a": "new"})
    book.note_attempt("c", Evidence.FAULT)
    assert [entry.revision for entry in book.report()] == ["new"]
    book.set_endpoints({"d": "old"})
    assert book.report() == ()


def test_the_number_of_revisions_is_bounded_and_a_replica_without_one_is_not_counted() -> None:
    book = TrialBook()
    book.set_endpoints({f"pod-{number}": f"r-{number}" for number in range(100)} | {"bare": ""})
    for number in range(100):
        book.note_attempt(f"pod-{number}", Evidence.SUCCESS)
    book.note_first_token("bare", 1.0)
    assert len(book.report()) == 16


@given(st.floats(min_value=0.0, max_value=3600.0))
def test_a_time_is_told_at_most_a_tenth_too_high_and_never_too_low(seconds: float) -> None:
    book = make_book(a="new")
    book.note_first_token("a", seconds)
    ((bound, count),) = book.report()[0].ttft_counts
    assert count == 1
    assert seconds * 1000 <= bound + 0.5
    assert bound <= max(1.0, seconds * 1100) + 0.5
