"""The packed structures against plain ones."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.routing import make_keys

from millpond_gateway.routing.packed import PackedMap
from millpond_gateway.routing.routed import RoutedIndex


class PlainIndex:
    """A replica's cache as a list of prefixes' keys, least recent first, the tail of a prefix before its head."""

    def __init__(self) -> None:
        self.keys: dict[str, list[int]] = {}

    def insert(self, uid: str, keys: list[int], capacity: int) -> None:
        held = self.keys.setdefault(uid, [])
        for key in reversed(keys[:capacity]):
            if key in held:
                held.remove(key)
            held.append(key)
        del held[: max(len(held) - capacity, 0)]

    def match(self, uid: str, keys: list[int]) -> int:
        held = set(self.keys.get(uid, ()))
        return next((position for position, key in enumerate(keys) if key not in held), len(keys))


prompts = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5)), min_size=1, max_size=4).map(
    lambda parts: make_keys(*parts)
)
steps = st.lists(st.tuples(st.sampled_from(["u0", "u1"]), prompts, st.integers(1, 30)), max_size=40)


@settings(max_examples=300, deadline=None)
@given(steps, st.lists(prompts, min_size=1, max_size=5))
def test_the_routed_index_is_an_lru_of_prefixes(
    history: list[tuple[str, list[int], int]], asked: list[list[int]]
) -> None:
    index, plain = RoutedIndex(max_bytes=1 << 30, speculative_seconds=1.0), PlainIndex()
    for now, (uid, keys, capacity) in enumerate(history):
        index.insert(uid, keys, capacity=capacity, now=float(now))
        plain.insert(uid, keys, capacity)
        assert index.num_blocks(uid) == len(plain.keys[uid])
    held = {key for keys in plain.keys.values() for key in keys}
    assert index.num_distinct_blocks == len(held)
    for keys in asked:
        found = index.match(keys, 0.0).replicas
        for uid in ("u0", "u1"):
            assert (found[uid].num_blocks if uid in found else 0) == plain.match(uid, keys)
    for uid in ("u0", "u1"):
        index.drop_replica(uid)
    assert index.num_bytes == 0


keys64 = st.one_of(st.integers(0, 40), st.integers(0, (1 << 64) - 1))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), keys64, st.integers(0, (1 << 64) - 1)), max_size=120))
def test_a_packed_map_is_a_dictionary(history: list[tuple[bool, int, int]]) -> None:
    table = PackedMap()
    plain: dict[int, int] = {}
    for put, key, value in history:
        if put:
            table.put(key, value)
            plain[key or 1] = value
        else:
            assert table.discard(key) is (plain.pop(key or 1, None) is not None)
        assert len(table) == len(plain)
    assert {key: table.get(key) for key in plain} == plain
    assert sorted(table) == sorted(plain)
