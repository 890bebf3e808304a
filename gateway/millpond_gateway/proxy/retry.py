"""May a failed attempt be repeated? Pure: evidence in, verdict out.

A request is sent again only while the engine has provably not started it, or its process is provably gone:
a blind resend generates, and bills, twice (RFC 9110 section 9.2.2).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from millpond_gateway.proxy.dispatch import Outcome
from millpond_gateway.proxy.records import Breakage


class Evidence(StrEnum):
    """What is known about a failed attempt."""

    NOT_CONNECTED = "NotConnected"
    NOTHING_ACCEPTED = "NothingAccepted"
    """The connection ended and the engine's host had acknowledged no byte of the request."""
    NOT_STARTED = "NotStarted"
    """The engine, asked, does not know the request."""
    PROCESS_GONE = "ProcessGone"
    """The engine's epoch changed, or nothing listens at its address any more."""
    OVERLOAD_ANSWERED = "OverloadAnswered"
    UNPROVEN = "Unproven"
    ANSWER_BEGAN = "AnswerBegan"


class Verdict(StrEnum):
    """What to do next."""

    RECONNECT = "Reconnect"
    """Same replica, fresh connection: the kept one was stale."""
    ELSEWHERE = "Elsewhere"
    PROVE = "Prove"
    """Ask the engine first."""
    FAIL = "Fail"


_REPEATABLE: Final = {
    Evidence.NOT_CONNECTED: Outcome.CONNECT_FAILED,
    Evidence.NOTHING_ACCEPTED: Outcome.CONNECTION_STALE,
    Evidence.NOT_STARTED: Outcome.REPLICA_FAILED,
    Evidence.PROCESS_GONE: Outcome.REPLICA_GONE,
    Evidence.OVERLOAD_ANSWERED: Outcome.OVERLOADED,
}


def name_outcome(evidence: Evidence) -> Outcome:
    """Outcome of an attempt that ended with this evidence."""
    if evidence is Evidence.ANSWER_BEGAN:
        return Outcome.STREAM_BROKEN
    return _REPEATABLE.get(evidence, Outcome.REPLICA_FAILED)


def decide_retry(
    evidence: Evidence, *, attempts: int, max_attempts: int, reused: bool, asked: bool
) -> Verdict:
    """Verdict on one failed attempt.

    Args:
        evidence: what is known.
        attempts: attempts made so far, this one included.
        max_attempts: bound on them.
        reused: the connection had served an earlier request.
        asked: the engine was already asked whether it started.
    """
    if evidence is Evidence.ANSWER_BEGAN:
        return Verdict.FAIL
    if evidence is Evidence.UNPROVEN:
        return Verdict.FAIL if asked else Verdict.PROVE
    if attempts >= max_attempts:
        return Verdict.FAIL
    if evidence is Evidence.NOTHING_ACCEPTED and reused:
        return Verdict.RECONNECT
    return Verdict.ELSEWHERE


def name_evidence(breakage: Breakage) -> Evidence:
    """What a broken connection proves."""
    if breakage.answered:
        return Evidence.ANSWER_BEGAN
    return Evidence.NOTHING_ACCEPTED if breakage.nothing_accepted else Evidence.UNPROVEN
