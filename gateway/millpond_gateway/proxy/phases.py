"""Phases of a request and the deadlines that hold in each. Pure."""

from __future__ import annotations

from enum import StrEnum

from millpond_gateway.proxy.dispatch import Outcome
from millpond_gateway.proxy.settings import RelaySettings


class Phase(StrEnum):
    """Where a request is."""

    HELD = "Held"
    CONNECTING = "Connecting"
    WAITING = "Waiting"
    PROVING = "Proving"
    RELAYING = "Relaying"
    ENDED = "Ended"


def find_overdue(
    phase: Phase,
    settings: RelaySettings,
    *,
    total_seconds: float,
    sent_seconds: float,
    silent_seconds: float,
    paused: bool,
) -> tuple[Outcome, str] | None:
    """The deadline that has passed and what to say about it.

    Args:
        phase: where the request is.
        settings: the deadlines.
        total_seconds: since the request was complete.
        sent_seconds: since it was sent to its engine.
        silent_seconds: since the engine's last byte.
        paused: the client is not reading, so the engine's silence is its own.
    """
    if total_seconds > settings.total_seconds:
        return Outcome.TOTAL_DEADLINE, f"no complete answer within {settings.total_seconds:g} s"
    if phase is Phase.WAITING and sent_seconds > settings.first_byte_seconds:
        return Outcome.FIRST_BYTE_DEADLINE, f"no answer within {settings.first_byte_seconds:g} s"
    if phase is Phase.RELAYING and not paused and silent_seconds > settings.idle_seconds:
        return Outcome.IDLE_DEADLINE, f"the answer stood still for {settings.idle_seconds:g} s"
    return None
