from __future__ import annotations

import pytest

from millpond_gateway.flow.outliers import Evidence, OutlierBook, classify_status

UIDS = [f"u{number}" for number in range(10)]


def note(
    book: OutlierBook, uid: str, evidence: Evidence, count: int, *, clients: int = 1, now: float = 1.0
) -> None:
    for number in range(count):
        book.note(uid, evidence, client=f"c{number % clients}", now=now)


@pytest.mark.parametrize(
    ("status", "retry_after", "evidence"),
    [
        (200, False, Evidence.SUCCESS),
        (400, False, Evidence.CLIENT_ERROR),
        (404, False, Evidence.CLIENT_ERROR),
        (429, False, Evidence.OVERLOAD),
        (503, True, Evidence.OVERLOAD),
        (503, False, Evidence.FAULT),
        (500, False, Evidence.FAULT),
        (502, False, Evidence.FAULT),
    ],
)
def test_statuses_are_sorted_into_evidence(status: int, retry_after: bool, evidence: Evidence) -> None:
    assert classify_status(status, retry_after=retry_after) is evidence


def test_gw_034_client_errors_are_no_evidence() -> None:
    book = OutlierBook()
    note(book, "u0", Evidence.CLIENT_ERROR, 20, clients=20)
    assert book.decide(UIDS, 2.0).ejected == frozenset()


def test_gw_035_overload_is_load_not_a_fault() -> None:
    book = OutlierBook()
    note(book, "u0", Evidence.OVERLOAD, 10, clients=10)
    verdict = book.decide(UIDS, 2.0)
    assert (verdict.ejected, verdict.suspects) == (frozenset(), frozenset())


def test_gw_036_one_clients_faults_eject_nobody() -> None:
    book = OutlierBook()
    for uid in UIDS:
        note(book, uid, Evidence.FAULT, 8)
    verdict = book.decide(UIDS, 2.0)
    assert verdict.ejected == frozenset()
    assert verdict.suspects == frozenset(UIDS)  # a probe tells the client's fault from theirs


def test_faults_of_several_clients_eject_and_a_failing_probe_stands_for_all() -> None:
    book = OutlierBook()
    note(book, "u0", Evidence.FAULT, 6, clients=3)
    book.note_probe("u1", ok=False)
    assert book.decide(UIDS, 2.0).ejected == {"u0", "u1"}


def test_mostly_successful_replicas_stay() -> None:
    book = OutlierBook()
    note(book, "u0", Evidence.SUCCESS, 20, clients=4)
    note(book, "u0", Evidence.FAULT, 6, clients=3)
    assert book.decide(UIDS, 2.0).ejected == frozenset()


def test_gw_036_at_most_30_percent_are_ejected_and_the_rest_is_a_condition() -> None:
    book = OutlierBook()
    for uid in UIDS[:6]:
        note(book, uid, Evidence.FAULT, 6, clients=3)
    verdict = book.decide(UIDS, 2.0)
    assert len(verdict.ejected) == 3
    assert verdict.capped
    assert not OutlierBook().decide(UIDS, 2.0).capped


def test_gw_037_half_open_closes_on_success_and_reopens_on_relapse() -> None:
    book = OutlierBook()
    note(book, "u0", Evidence.FAULT, 6, clients=3)
    assert book.decide(UIDS, 2.0).ejected == {"u0"}
    assert book.decide(UIDS, 11.0).ejected == {"u0"}
    half_open = book.decide(UIDS, 12.5)
    assert (half_open.ejected, half_open.probing) == (frozenset(), {"u0"})
    note(book, "u0", Evidence.FAULT, 2, clients=2, now=13.0)
    assert book.decide(UIDS, 13.0).ejected == {"u0"}
    assert book.decide(UIDS, 13.0 + 19.0).ejected == {"u0"}  # twice as long the second time
    assert book.decide(UIDS, 13.0 + 20.5).probing == {"u0"}
    note(book, "u0", Evidence.SUCCESS, 1, now=34.0)
    closed = book.decide(UIDS, 34.0)
    assert (closed.ejected, closed.probing) == (frozenset(), frozenset())


def test_one_client_does_not_reopen_a_half_open_breaker() -> None:
    book = OutlierBook()
    note(book, "u0", Evidence.FAULT, 6, clients=3)
    book.decide(UIDS, 2.0)
    book.decide(UIDS, 12.5)
    note(book, "u0", Evidence.FAULT, 10, now=13.0)
    assert book.decide(UIDS, 13.0).ejected == frozenset()


def test_a_good_probe_readmits_at_once() -> None:
    book = OutlierBook()
    note(book, "u0", Evidence.FAULT, 6, clients=3)
    book.decide(UIDS, 2.0)
    book.note_probe("u0", ok=True)
    assert book.decide(UIDS, 3.0).ejected == frozenset()


def test_old_faults_and_gone_replicas_are_forgotten() -> None:
    book = OutlierBook()
    note(book, "u0", Evidence.FAULT, 6, clients=3, now=1.0)
    assert book.decide(UIDS, 40.0).ejected == frozenset()
    book.note_probe("u1", ok=False)
    book.keep_only(["u0"])
    assert book.decide(UIDS, 41.0).ejected == frozenset()


def test_an_overload_answer_neither_dilutes_faults_nor_closes_a_breaker() -> None:
    book = OutlierBook()
    note(book, "u0", Evidence.FAULT, 6, clients=3)
    note(book, "u0", Evidence.OVERLOAD, 30, clients=3)
    assert book.decide(UIDS, 2.0).ejected == {"u0"}
    assert book.decide(UIDS, 12.5).probing == {"u0"}
    note(book, "u0", Evidence.OVERLOAD, 3, clients=3, now=13.0)
    assert book.decide(UIDS, 13.0).probing == {"u0"}
