"""Grammars kept between requests: each tenant's apart, within bounds of bytes and number.

A tenant finds only what itself has compiled, so that neither a hit nor the time of a miss tells about another's
schemas. Room is made by the tenant that holds most: whoever floods the cache drops its own.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from millpond_engine.grammar.spec import GrammarSpec

T = TypeVar("T")

BASE_BYTES = 64 << 10
BYTES_PER_CHARACTER = 256
"""A grammar takes 30 to 270 bytes of memory for a character of its source; the library does not tell."""


def estimate_bytes(spec: GrammarSpec) -> int:
    """Memory that a compiled grammar is charged with."""
    return BASE_BYTES + BYTES_PER_CHARACTER * len(spec.text)


class GrammarCache(Generic[T]):
    """The least recently used leaves first, of the tenant that holds most. Owned by one thread."""

    def __init__(self, *, max_bytes: int, max_grammars: int) -> None:
        self._max_bytes = max_bytes
        self._max_grammars = max_grammars
        self._kept: dict[str, OrderedDict[GrammarSpec, T]] = {}
        self._bytes: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(len(own) for own in self._kept.values())

    @property
    def num_bytes(self) -> int:
        """Charged for all that is kept."""
        return sum(self._bytes.values())

    def get(self, tenant: str, spec: GrammarSpec) -> T | None:
        """What this tenant has kept for a spec."""
        own = self._kept.get(tenant)
        if own is None or spec not in own:
            return None
        own.move_to_end(spec)
        return own[spec]

    def put(self, tenant: str, spec: GrammarSpec, value: T) -> None:
        """Keep a value, unless it alone is larger than all may be."""
        size = estimate_bytes(spec)
        if size > self._max_bytes or self.get(tenant, spec) is not None:
            return
        self._kept.setdefault(tenant, OrderedDict())[spec] = value
        self._bytes[tenant] = self._bytes.get(tenant, 0) + size
        while self.num_bytes > self._max_bytes or len(self) > self._max_grammars:
            self._drop_oldest(max(self._bytes, key=self._bytes.__getitem__))

    def _drop_oldest(self, tenant: str) -> None:
        own = self._kept[tenant]
        spec, _ = own.popitem(last=False)
        self._bytes[tenant] -= estimate_bytes(spec)
        if not own:
            del self._kept[tenant], self._bytes[tenant]
