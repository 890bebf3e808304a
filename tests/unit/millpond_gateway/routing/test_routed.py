from __future__ import annotations

import math
import tracemalloc
from array import array

import pytest
from tests.support.routing import make_keys

from millpond_gateway.routing.routed import RoutedIndex
from millpond_gateway.routing.splitmix import SplitMix


def make_index(max_bytes: int = 1 << 30) -> RoutedIndex:
    return RoutedIndex(max_bytes=max_bytes, speculative_seconds=3.0)


def blocks(index: RoutedIndex, keys: list[int], now: float = 0.0) -> dict[str, int]:
    return {uid: match.num_blocks for uid, match in index.match(keys, now).replicas.items()}


def test_prefixes_match_to_the_last_common_block() -> None:
    index = make_index()
    index.insert("a", make_keys((1, 10), (2, 5)), capacity=100, now=0.0)
    index.insert("b", make_keys((1, 10), (3, 7)), capacity=100, now=0.0)
    assert blocks(index, make_keys((1, 10), (2, 5), (4, 2))) == {"a": 15, "b": 10}
    assert blocks(index, make_keys((1, 10), (3, 3))) == {"a": 10, "b": 13}
    assert blocks(index, make_keys((1, 4))) == {"a": 4, "b": 4}
    assert blocks(index, make_keys((9, 4))) == {}
    assert blocks(index, []) == {}


def test_shared_blocks_are_those_before_prompts_part() -> None:
    index = make_index()
    index.insert("a", make_keys((1, 10), (2, 5)), capacity=100, now=0.0)
    assert (
        index.match(make_keys((1, 10), (2, 5), (2, 9)), 0.0).num_shared_blocks == 0
    )  # one session's history
    assert index.match(make_keys((1, 10), (3, 5)), 0.0).num_shared_blocks == 10  # two ways part here
    index.insert("b", make_keys((1, 10), (3, 5)), capacity=100, now=0.0)
    assert index.match(make_keys((1, 10), (3, 5), (8, 1)), 0.0).num_shared_blocks == 10
    assert index.match(make_keys((1, 10), (7, 5)), 0.0).num_shared_blocks == 10
    assert index.match(make_keys((7, 5)), 0.0).num_shared_blocks == 0


def test_copies_of_what_is_shared_are_counted_with_their_last_use() -> None:
    index = make_index()
    index.insert("a", make_keys((1, 10), (2, 5)), capacity=100, now=1.0)
    index.insert("b", make_keys((1, 10), (3, 5)), capacity=100, now=2.0)
    index.insert("c", make_keys((1, 4)), capacity=100, now=3.0)  # a part of it only
    for third in ((4, 1), (3, 9)):  # one prompt parts at a node's end, the other inside a node
        found = index.match(make_keys((1, 10), third), 5.0)
        assert (found.num_shared_blocks, found.num_shared_copies, found.shared_routed_at) == (10, 2, 2.0)
    inside = index.match(make_keys((1, 7), (9, 1)), 5.0)
    assert (inside.num_shared_blocks, inside.num_shared_copies) == (7, 2)
    alone = index.match(make_keys((7, 3)), 5.0)
    assert (alone.num_shared_blocks, alone.num_shared_copies) == (0, 0)


def test_a_full_replica_keeps_blocks_as_long_as_its_oldest_one_is_old() -> None:
    index = make_index()
    assert index.retention_seconds("a", 7.0) == math.inf
    index.insert("a", make_keys((1, 50)), capacity=100, now=1.0)
    assert index.retention_seconds("a", 7.0) == math.inf  # there is room
    index.insert("a", make_keys((2, 45)), capacity=100, now=3.0)
    assert index.retention_seconds("a", 7.0) == 6.0
    index.insert("a", make_keys((3, 60)), capacity=100, now=5.0)
    assert index.retention_seconds("a", 7.0) == 4.0


def test_eviction_takes_the_least_recent_tail_first() -> None:
    index = make_index()
    index.insert("a", make_keys((1, 4), (2, 4)), capacity=12, now=0.0)
    index.insert("a", make_keys((1, 4), (3, 4)), capacity=12, now=1.0)
    assert index.num_blocks("a") == 12
    index.insert("a", make_keys((1, 4), (4, 2)), capacity=12, now=2.0)
    assert blocks(index, make_keys((1, 4), (2, 4))) == {"a": 6}
    assert blocks(index, make_keys((1, 4), (3, 4))) == {"a": 8}
    assert blocks(index, make_keys((1, 4), (4, 2))) == {"a": 6}
    assert index.num_blocks("a") == 12


def test_a_refreshed_prefix_outlives_an_older_one() -> None:
    index = make_index()
    index.insert("a", make_keys((1, 5)), capacity=10, now=0.0)
    index.insert("a", make_keys((2, 5)), capacity=10, now=1.0)
    index.insert("a", make_keys((1, 5)), capacity=10, now=2.0)
    index.insert("a", make_keys((3, 5)), capacity=10, now=3.0)
    assert blocks(index, make_keys((1, 5))) == {"a": 5}
    assert blocks(index, make_keys((2, 5))) == {}


def test_a_prompt_longer_than_the_cache_keeps_its_head() -> None:
    index = make_index()
    index.insert("a", make_keys((1, 50)), capacity=20, now=0.0)
    assert blocks(index, make_keys((1, 50))) == {"a": 20}


def test_recent_blocks_are_told_apart() -> None:
    index = make_index()
    index.insert("a", make_keys((1, 4)), capacity=100, now=0.0)
    index.insert("a", make_keys((1, 4), (2, 4)), capacity=100, now=10.0)
    match = index.match(make_keys((1, 4), (2, 4)), 11.0).replicas["a"]
    assert (match.num_blocks, match.num_recent_blocks) == (8, 8)
    assert index.match(make_keys((1, 4), (2, 4)), 14.0).replicas["a"].num_recent_blocks == 0


def test_dropping_a_replica_frees_what_only_it_held() -> None:
    index = make_index()
    index.insert("a", make_keys((1, 10), (2, 5)), capacity=100, now=0.0)
    index.insert("b", make_keys((1, 10)), capacity=100, now=0.0)
    assert (index.count_unique_blocks("a"), index.count_unique_blocks("b")) == (5, 0)
    assert index.drop_replica("a") == 15
    assert index.num_distinct_blocks == 10
    assert blocks(index, make_keys((1, 10), (2, 5))) == {"b": 10}
    index.drop_replica("b")
    assert (index.num_distinct_blocks, index.num_bytes) == (0, 0)


def test_gw_076_there_is_no_fixed_number_of_replicas() -> None:
    index = make_index()
    keys = make_keys((1, 8))
    for number in range(2049):
        index.insert(f"u{number}", keys, capacity=100, now=0.0)
    assert len(blocks(index, keys)) == 2049


def test_gw_091_unique_prompts_do_not_grow_the_index_past_its_bytes() -> None:
    index = make_index(max_bytes=200_000)
    generator = SplitMix(1)
    for number in range(3000):
        keys = array("Q", [generator.next() for _ in range(30)])
        index.insert(f"u{number % 4}", keys, capacity=100_000, now=float(number))
        assert index.num_bytes <= 200_000
    newest = index.match(keys, 3000.0).replicas
    assert newest["u3"].num_blocks == 30  # the newest survive


def test_gw_092_bytes_per_block_stay_within_budget() -> None:
    generator = SplitMix(1)
    index = make_index()
    prompts = [[generator.next() for _ in range(62)] for _ in range(4000)]  # a thousand tokens each
    shared = [make_keys((system, 40)) for system in range(20)]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number, prompt in enumerate(prompts):
        index.insert(f"u{number % 100}", shared[number % 20] + prompt, capacity=1 << 20, now=0.0)
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert used / index.num_distinct_blocks <= 40
    assert used == pytest.approx(index.num_bytes, rel=0.35)
