from __future__ import annotations

from dataclasses import dataclass

import pytest

from millpond_engine.grammar.cache import BASE_BYTES, BYTES_PER_TOKEN, GrammarCache, estimate_bytes
from millpond_engine.grammar.spec import GrammarKind, GrammarSpec
from millpond_engine.records.grammar import Guide


@dataclass
class Used:
    num_taken: int = 0
    failed: bool = False

    def start(self) -> Guide:
        raise AssertionError


def make_spec(name: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, name)


def test_a_tenant_finds_only_what_it_has_kept() -> None:
    cache = GrammarCache(max_bytes=1 << 30, max_grammars=100)
    cache.put("a", make_spec("x"), "kept")
    assert cache.get("a", make_spec("x")) == "kept"
    assert cache.get("b", make_spec("x")) is None
    assert cache.get("a", GrammarSpec(GrammarKind.LARK, "x")) is None
    assert cache.get("a", GrammarSpec(GrammarKind.REGEX, "x", keep_ends=False)) is None


@pytest.mark.parametrize("bound", ["bytes", "number"])
def test_who_floods_the_cache_drops_its_own(bound: str) -> None:
    room = 10 * estimate_bytes(make_spec("000"), "")
    cache = GrammarCache(
        max_bytes=room if bound == "bytes" else 1 << 30, max_grammars=10 if bound == "number" else 1000
    )
    for name in "pq":
        cache.put("quiet", make_spec(name), name)
    for number in range(200):
        cache.put("loud", make_spec(f"{number:03}"), "loud")
        assert sum(cache.measure().values()) <= (room if bound == "bytes" else 1 << 30)
        assert len(cache) <= 10
    assert [cache.get("quiet", make_spec(name)) for name in "pq"] == ["p", "q"]
    assert cache.get("loud", make_spec("199")) == "loud"
    assert cache.get("loud", make_spec("000")) is None


def test_the_least_recently_used_leaves_first() -> None:
    cache = GrammarCache(max_bytes=1 << 30, max_grammars=3)
    for name in "abc":
        cache.put("t", make_spec(name), name)
    assert cache.get("t", make_spec("a")) == "a"
    cache.put("t", make_spec("d"), "d")
    assert [cache.get("t", make_spec(name)) for name in "abcd"] == ["a", None, "c", "d"]


def test_what_is_used_is_charged_for_what_it_may_have_grown_by() -> None:
    cache = GrammarCache(max_bytes=1 << 20, max_grammars=100)
    used = Used()
    cache.put("busy", make_spec("a"), used)
    cache.put("calm", make_spec("b"), Used())
    used.num_taken = 200
    assert cache.measure()["busy"] - cache.measure()["calm"] == 200 * BYTES_PER_TOKEN
    cache.put("calm", make_spec("c"), Used())
    assert cache.get("busy", make_spec("a")) is None
    assert cache.get("calm", make_spec("b")) is not None


def test_what_is_larger_than_all_room_is_not_kept() -> None:
    cache = GrammarCache(max_bytes=BASE_BYTES, max_grammars=3)
    cache.put("t", make_spec("a"), "a")
    assert len(cache) == 0
    assert cache.measure() == {}
