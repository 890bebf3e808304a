from __future__ import annotations

import pytest

from millpond_engine.grammar.cache import BASE_BYTES, GrammarCache, estimate_bytes
from millpond_engine.grammar.spec import GrammarKind, GrammarSpec


def make_spec(name: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, name)


def test_a_tenant_finds_only_what_it_has_kept() -> None:
    cache = GrammarCache[str](max_bytes=1 << 30, max_grammars=100)
    cache.put("a", make_spec("x"), "kept")
    assert cache.get("a", make_spec("x")) == "kept"
    assert cache.get("b", make_spec("x")) is None
    assert cache.get("a", GrammarSpec(GrammarKind.LARK, "x")) is None
    assert cache.get("a", GrammarSpec(GrammarKind.REGEX, "x", keep_ends=False)) is None


@pytest.mark.parametrize("bound", ["bytes", "number"])
def test_who_floods_the_cache_drops_its_own(bound: str) -> None:
    room = 10 * estimate_bytes(make_spec("000"))
    cache = GrammarCache[str](
        max_bytes=room if bound == "bytes" else 1 << 30, max_grammars=10 if bound == "number" else 1000
    )
    for name in "pq":
        cache.put("quiet", make_spec(name), name)
    for number in range(200):
        cache.put("loud", make_spec(f"{number:03}"), "loud")
        assert cache.num_bytes <= (room if bound == "bytes" else 1 << 30)
        assert len(cache) <= 10
    assert [cache.get("quiet", make_spec(name)) for name in "pq"] == ["p", "q"]
    assert cache.get("loud", make_spec("199")) == "loud"
    assert cache.get("loud", make_spec("000")) is None


def test_the_least_recently_used_leaves_first() -> None:
    cache = GrammarCache[str](max_bytes=1 << 30, max_grammars=3)
    for name in "abc":
        cache.put("t", make_spec(name), name)
    assert cache.get("t", make_spec("a")) == "a"
    cache.put("t", make_spec("d"), "d")
    assert [cache.get("t", make_spec(name)) for name in "abcd"] == ["a", None, "c", "d"]


def test_what_is_larger_than_all_room_is_not_kept() -> None:
    cache = GrammarCache[str](max_bytes=BASE_BYTES, max_grammars=3)
    cache.put("t", make_spec("a"), "a")
    assert len(cache) == cache.num_bytes == 0
