from __future__ import annotations

from millpond_gateway.app.memory import Trimmer


def test_memory_is_given_back_once_after_a_burst_has_stayed_over() -> None:
    trimmer = Trimmer()
    seen = [(1000, 0.0), (50, 1.0), (300, 2.0), (50, 3.0), (40, 7.9), (40, 8.1), (40, 20.0), (40, 30.0)]
    assert [trimmer.look(count, now) for count, now in seen] == [False] * 5 + [True, False, False]


def test_small_loads_are_left_alone() -> None:
    trimmer = Trimmer()
    assert not any(trimmer.look(count, now) for count, now in [(200, 0.0), (0, 1.0), (0, 100.0)])
