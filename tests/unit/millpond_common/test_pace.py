"""What happens without end is told now and then, and nothing of it is forgotten."""

from __future__ import annotations

from millpond_common.pace import Pace


def test_the_first_is_told_at_once_and_the_next_with_those_kept_back() -> None:
    times = iter((100.0, 100.1, 104.0, 110.0, 110.5, 130.0))
    pace = Pace(10.0, lambda: next(times))
    assert [pace.count() for _ in range(6)] == [1, 0, 0, 3, 0, 2]
