from __future__ import annotations

import pytest

from millpond_gateway.proxy.dispatch import FAULTS, Outcome
from millpond_gateway.proxy.records import Breakage
from millpond_gateway.proxy.retry import Evidence, Verdict, decide_retry, name_evidence, name_outcome


def decide(evidence: Evidence, attempts: int = 1, *, reused: bool = False, asked: bool = False) -> Verdict:
    return decide_retry(evidence, attempts=attempts, max_attempts=3, reused=reused, asked=asked)


@pytest.mark.parametrize(
    "evidence",
    [
        Evidence.NOT_CONNECTED,
        Evidence.NOTHING_ACCEPTED,
        Evidence.NOT_STARTED,
        Evidence.PROCESS_GONE,
        Evidence.OVERLOAD_ANSWERED,
    ],
)
def test_proof_allows_another_replica_until_the_attempts_are_used_up(evidence: Evidence) -> None:
    assert [decide(evidence, attempts) for attempts in (1, 2, 3)] == [
        Verdict.ELSEWHERE,
        Verdict.ELSEWHERE,
        Verdict.FAIL,
    ]


def test_gw_041_without_proof_the_engine_is_asked_once_and_then_it_fails() -> None:
    assert decide(Evidence.UNPROVEN) is Verdict.PROVE
    assert decide(Evidence.UNPROVEN, asked=True) is Verdict.FAIL


def test_after_the_first_byte_nothing_is_repeated() -> None:
    for reused in (True, False):
        assert decide(Evidence.ANSWER_BEGAN, reused=reused) is Verdict.FAIL


def test_gw_114_a_stale_connection_is_replaced_by_a_fresh_one_to_the_same_replica() -> None:
    assert decide(Evidence.NOTHING_ACCEPTED, reused=True) is Verdict.RECONNECT
    assert decide(Evidence.NOTHING_ACCEPTED, reused=False) is Verdict.ELSEWHERE


def test_every_evidence_has_an_outcome_and_overload_is_no_fault() -> None:
    assert {name_outcome(evidence) for evidence in Evidence} <= set(Outcome)
    assert name_outcome(Evidence.OVERLOAD_ANSWERED) not in FAULTS
    assert Outcome.CLIENT_LEFT not in FAULTS


def test_evidence_of_a_breakage() -> None:
    assert name_evidence(Breakage("", answered=True, nothing_accepted=True)) is Evidence.ANSWER_BEGAN
    assert name_evidence(Breakage("", answered=False, nothing_accepted=True)) is Evidence.NOTHING_ACCEPTED
    assert name_evidence(Breakage("", answered=False, nothing_accepted=False)) is Evidence.UNPROVEN
