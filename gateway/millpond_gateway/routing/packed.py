"""Hash tables of unsigned 64-bit numbers in flat arrays: about 15 bytes an entry, where a dict takes a hundred.

Open addressing with linear probing; deletion shifts followers back, so no tombstones pile up. The keys must be
hashes already, since they choose their place by remainder; `spread` makes keys of numbers that are none. Zero
marks a free place; the key zero is kept as one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Final

_MIN_PLACES: Final = 16
_MAX_LOAD: Final = 0.72


def spread(number: int) -> int:
    """A 64-bit key from a number that may be a small one; different numbers give different keys."""
    return number * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF


def _zeros(count: int) -> array[int]:
    return array("Q", bytes(8 * count))


class PackedSet:
    """A set of 64-bit keys. `expected` entries are given room at once, so that filling up never rebuilds."""

    __slots__ = ("_count", "_keys", "_limit", "_min_places", "_places")

    def __init__(self, expected: int = 0) -> None:
        self._min_places = max(int(expected / _MAX_LOAD) + 1, _MIN_PLACES)
        self.clear()

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: int) -> bool:
        keys = self._keys
        places = self._places
        key = key or 1
        place = key % places
        while (found := keys[place]) != key:
            if not found:
                return False
            place = place + 1 if place + 1 < places else 0
        return True

    def __iter__(self) -> Iterator[int]:
        return (key for key in self._keys if key)

    @property
    def num_bytes(self) -> int:
        """Memory of the table."""
        return 8 * self._places

    def clear(self) -> None:
        """Drop everything, memory included."""
        self._resize_empty(self._min_places)

    def add(self, key: int) -> bool:
        """Enter a key; False when it was there."""
        key = key or 1
        place = self._find(key)
        if self._keys[place]:
            return False
        if self._count >= self._limit:
            self._rebuild(self._places * 3 // 2 + 1)
            place = self._find(key)
        self._keys[place] = key
        self._count += 1
        return True

    def discard(self, key: int) -> bool:
        """Remove a key; False when it was not there."""
        key = key or 1
        place = self._find(key)
        if not self._keys[place]:
            return False
        self._close_gap(place)
        self._count -= 1
        if self._places > self._min_places and self._count * 4 < self._places:
            self._rebuild(max(self._count * 2, self._min_places))
        return True

    def find_end(self, keys: Sequence[int], start: int) -> int:
        """End of the leading keys from `start` on that are in the set, where presence is monotone.

        Looks at the first and the last key, then bisects; probing is written out, since a choice does it for every
        replica.
        """
        table = self._keys
        places = self._places
        low, high = start, len(keys)
        middle = start
        while low < high:
            key = keys[middle] or 1
            place = key % places
            while (found := table[place]) != key and found:
                place = place + 1 if place + 1 < places else 0
            if found:
                low = middle + 1
                middle = high - 1 if middle == start else (low + high) // 2
            else:
                high = middle
                middle = (low + high) // 2
        return low

    def _find(self, key: int) -> int:
        """Place of the key, or the free place where it belongs."""
        keys = self._keys
        place = key % self._places
        while (found := keys[place]) and found != key:
            place = place + 1 if place + 1 < self._places else 0
        return place

    def _close_gap(self, gap: int) -> None:
        """Free a place and move followers back that probing would no longer reach."""
        keys = self._keys
        place = gap
        while True:
            place = place + 1 if place + 1 < self._places else 0
            key = keys[place]
            if not key:
                break
            home = key % self._places
            if (place - home) % self._places >= (place - gap) % self._places:
                self._move(place, gap)
                gap = place
        keys[gap] = 0

    def _move(self, source: int, target: int) -> None:
        self._keys[target] = self._keys[source]

    def _rebuild(self, places: int) -> None:
        old = self._keys
        self._resize_empty(places)
        for key in old:
            if key:
                self._keys[self._find(key)] = key
                self._count += 1

    def _resize_empty(self, places: int) -> None:
        self._places = places
        self._keys = _zeros(places)
        self._count = 0
        self._limit = int(places * _MAX_LOAD)


class PackedMap(PackedSet):
    """A map from 64-bit keys to 64-bit values."""

    __slots__ = ("_values",)

    @property
    def num_bytes(self) -> int:
        """Memory of the tables."""
        return 16 * self._places

    def put(self, key: int, value: int) -> None:
        """Enter or replace a value."""
        self.add(key)
        self._values[self._find(key or 1)] = value

    def get(self, key: int) -> int | None:
        """Value of a key; None when it is not there."""
        place = self._find(key or 1)
        return self._values[place] if self._keys[place] else None

    def _move(self, source: int, target: int) -> None:
        super()._move(source, target)
        self._values[target] = self._values[source]

    def _rebuild(self, places: int) -> None:
        old_keys, old_values = self._keys, self._values
        self._resize_empty(places)
        for key, value in zip(old_keys, old_values, strict=True):
            if key:
                place = self._find(key)
                self._keys[place] = key
                self._values[place] = value
                self._count += 1

    def _resize_empty(self, places: int) -> None:
        super()._resize_empty(places)
        self._values = _zeros(places)
