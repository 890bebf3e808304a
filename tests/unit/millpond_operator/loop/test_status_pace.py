"""News that is not urgent waits, longer where the API server is busy."""

from __future__ import annotations

from millpond_operator.loop.status_pace import HOLD_SECONDS, MAX_HOLD_SECONDS, MAX_KNOWN, StatusPace


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_pool_that_was_not_written_waits_for_nothing() -> None:
    assert StatusPace(Clock()).get_wait("a") == 0


def test_the_wait_follows_the_time_of_the_last_write_within_bounds() -> None:
    clock = Clock()
    pace = StatusPace(clock)
    for seconds, wait in ((0.005, HOLD_SECONDS), (0.4, 4.0), (30.0, MAX_HOLD_SECONDS)):
        pace.note("a", seconds=seconds)
        assert pace.get_wait("a") == wait
    assert pace.get_wait("b") == 0
    clock.now += MAX_HOLD_SECONDS
    assert pace.get_wait("a") == 0


def test_pools_that_are_gone_are_forgotten() -> None:
    clock = Clock()
    pace = StatusPace(clock)
    for number in range(MAX_KNOWN):
        pace.note(str(number), seconds=0)
    clock.now += HOLD_SECONDS
    pace.note("new", seconds=0)
    assert len(pace._until) == 1
