"""Claims at a limit that gateways share: decided when every other's are known, as far as this process can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from millpond_gateway.app.claims import ClaimDesk, Sharing
from millpond_gateway.flow.budget import CLAIM_SECONDS
from millpond_gateway.proxy.dispatch import Call
from millpond_gateway.routing.records import RequestView


class _Call:
    def __init__(self, name: str) -> None:
        self.id = name


def make_desk() -> tuple[ClaimDesk, list[float]]:
    """A desk, and the delays after which it wants to be asked."""
    delays: list[float] = []
    sharing = Sharing()

    def call_later(seconds: float, _: Callable[[], None]) -> None:
        delays.append(seconds)

    sharing.call_later = call_later
    return ClaimDesk(sharing, lambda: None), delays


def add(desk: ClaimDesk, name: str, now: float) -> None:
    desk.add(cast("Call", _Call(name)), "", cast("RequestView", None), lambda _: None, now)


def take_all_due(desk: ClaimDesk, now: float) -> list[str]:
    found = []
    while (claim := desk.take_due(now)) is not None:
        found.append(claim.call.id)
    return found


def test_claims_come_due_in_order_once_the_others_know_of_them() -> None:
    desk, delays = make_desk()
    add(desk, "a", 1.0)
    add(desk, "b", 1.01)
    assert take_all_due(desk, 1.05) == []
    assert take_all_due(desk, 1.0 + CLAIM_SECONDS + 0.001) == ["a"]
    assert take_all_due(desk, 1.01 + CLAIM_SECONDS + 0.001) == ["b"]
    assert len(delays) == 2


def test_a_process_that_is_late_reads_first_what_the_others_said() -> None:
    desk, delays = make_desk()
    add(desk, "a", 1.0)
    add(desk, "b", 1.05)
    late = 1.0 + 2 * CLAIM_SECONDS
    assert take_all_due(desk, late) == []
    assert len(delays) == 3
    assert take_all_due(desk, late + CLAIM_SECONDS / 2) == []
    assert take_all_due(desk, late + CLAIM_SECONDS) == ["a", "b"]


def test_one_that_is_always_late_decides_after_a_bounded_time() -> None:
    desk, _ = make_desk()
    add(desk, "a", 0.0)
    times = [0.5 * turn for turn in range(1, 40)]
    decided = next(now for now in times if take_all_due(desk, now))
    assert 1.0 <= decided <= 10.0
