"""What ranks agree on, without processes."""

from __future__ import annotations

from typing import Any

import pytest

from millpond_engine.runner.group import RankGroup
from millpond_engine.runner.memory import PoolSize, PoolTooSmallError


class Others:
    """Collectives that answer for one other rank."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def exchange(self, value: Any) -> list[Any]:
        return [value, self._value]


def group_with(value: Any) -> RankGroup:
    return RankGroup(None, Others(value))  # type: ignore[arg-type]


def test_the_smallest_pool_serves_all_and_names_its_rank() -> None:
    mine = PoolSize(100, "its memory")
    assert group_with((70, "less memory")).agree_on_pool(lambda: mine) == PoolSize(70, "less memory (rank 1)")
    assert group_with((170, "more memory")).agree_on_pool(lambda: mine) == mine
    assert RankGroup().agree_on_pool(lambda: mine) == mine


def test_a_rank_without_room_refuses_for_all() -> None:
    def none() -> PoolSize:
        raise PoolTooSmallError("no block fits here")

    with pytest.raises(PoolTooSmallError, match="none there"):
        group_with((0, "none there")).agree_on_pool(lambda: PoolSize(9, "room"))
    with pytest.raises(PoolTooSmallError, match="no block fits here"):
        group_with((9, "room")).agree_on_pool(none)


def test_the_slowest_rank_bounds_the_copies_of_all() -> None:
    total, rate = group_with((100, 4.0)).agree_on_copies(200, 100.0)  # 2 s here, 4 s there
    assert (total, rate) == (300, 75.0)
