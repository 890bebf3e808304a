"""Grammars kept between requests: each tenant's apart, within bounds of bytes and number.

A tenant finds only what itself has compiled, so that neither a hit nor the time of a miss tells about another's
schemas. Room is made by the tenant that holds most: whoever floods the cache drops its own.
"""

from __future__ import annotations

from collections import OrderedDict

from millpond_engine.grammar.spec import GrammarSpec
from millpond_engine.records.grammar import Grammar

BASE_BYTES = 64 << 10
BYTES_PER_CHARACTER = 256
"""A grammar takes 30 to 270 bytes of memory for a character of its source; the library does not tell."""
BYTES_PER_TOKEN = 5 << 10
"""What one more token may make the lexer derive, at worst: 29 MB were measured after 6,000 random ones."""
MAX_TOKENS = 8192
"""A grammar that has taken so many is compiled anew, which costs less than what it may have grown by."""

Kept = Grammar | str
"""A compiled grammar, or why there is none."""


def is_worn(kept: Kept) -> bool:
    """Use has made it large or showed its bounds: it should not be started from any more."""
    return not isinstance(kept, str) and (kept.num_taken > MAX_TOKENS or kept.failed)


def estimate_bytes(spec: GrammarSpec, kept: Kept) -> int:
    """Memory that it is charged with."""
    tokens = 0 if isinstance(kept, str) else kept.num_taken
    return BASE_BYTES + BYTES_PER_CHARACTER * len(spec.text) + BYTES_PER_TOKEN * tokens


class GrammarCache:
    """The least recently used leaves first, of the tenant that holds most. Owned by one thread."""

    def __init__(self, *, max_bytes: int, max_grammars: int) -> None:
        self._max_bytes = max_bytes
        self._max_grammars = max_grammars
        self._kept: dict[str, OrderedDict[GrammarSpec, Kept]] = {}

    def __len__(self) -> int:
        return sum(len(own) for own in self._kept.values())

    def get(self, tenant: str, spec: GrammarSpec) -> Kept | None:
        """What this tenant has kept for a spec."""
        own = self._kept.get(tenant)
        if own is None or spec not in own:
            return None
        own.move_to_end(spec)
        if is_worn(own[spec]):
            self._drop(tenant, spec)
            return None
        return own[spec]

    def put(self, tenant: str, spec: GrammarSpec, kept: Kept) -> None:
        """Keep a grammar or a failure, unless it alone is larger than all may be."""
        if estimate_bytes(spec, kept) > self._max_bytes:
            return
        own = self._kept.setdefault(tenant, OrderedDict())
        own[spec] = kept
        own.move_to_end(spec)
        sizes = self.measure()
        while sum(sizes.values()) > self._max_bytes or len(self) > self._max_grammars:
            largest = max(sizes, key=sizes.__getitem__)
            oldest = next(iter(self._kept[largest]))
            sizes[largest] -= estimate_bytes(oldest, self._kept[largest][oldest])
            self._drop(largest, oldest)

    def measure(self) -> dict[str, int]:
        """Bytes charged to each tenant now: what has been used since it was kept has grown."""
        return {
            tenant: sum(estimate_bytes(spec, kept) for spec, kept in own.items())
            for tenant, own in self._kept.items()
        }

    def _drop(self, tenant: str, spec: GrammarSpec) -> None:
        own = self._kept[tenant]
        del own[spec]
        if not own:
            del self._kept[tenant]
