from __future__ import annotations

from millpond_gateway.routing.packed import PackedMap, PackedSet, spread
from millpond_gateway.routing.splitmix import SplitMix


def test_zero_is_a_key_like_any_other() -> None:
    keys = PackedSet()
    assert keys.add(0)
    assert 0 in keys
    assert keys.discard(0)
    assert 0 not in keys
    assert len(keys) == 0


def test_a_map_keeps_the_last_value() -> None:
    table = PackedMap()
    table.put(5, 1)
    table.put(5, 2)
    assert table.get(5) == 2
    assert table.get(6) is None
    assert len(table) == 1


def test_colliding_keys_survive_a_deletion_between_them() -> None:
    keys = PackedSet()
    colliding = [16 * step + 3 for step in range(6)]  # all begin at place 3 of 16
    for key in colliding:
        keys.add(key)
    keys.discard(colliding[1])
    assert [key in keys for key in colliding] == [True, False, True, True, True, True]


def test_entries_cost_less_than_twenty_four_bytes() -> None:
    generator = SplitMix(1)
    keys, table = PackedSet(), PackedMap()
    for _ in range(20_000):
        key = generator.next()
        keys.add(key)
        table.put(key, 1)
    assert keys.num_bytes / len(keys) <= 24
    assert table.num_bytes / len(table) <= 40


def test_a_set_with_room_never_rebuilds() -> None:
    keys = PackedSet(expected=1000)
    size = keys.num_bytes
    for key in range(1, 1001):
        keys.add(key)
    assert keys.num_bytes == size


def test_memory_comes_back() -> None:
    keys = PackedSet()
    for number in range(10_000):
        keys.add(spread(number))
    full = keys.num_bytes
    for number in range(10_000):
        keys.discard(spread(number))
    assert keys.num_bytes < full / 50
