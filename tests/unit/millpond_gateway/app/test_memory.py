from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks.gateway_cost import ALLOCATOR

from millpond_gateway.app.memory import Trimmer, find_allocator, find_return_free

DOCKERFILE = Path(__file__).resolve().parents[4] / "gateway" / "Dockerfile"


def test_memory_is_given_back_once_after_a_burst_has_stayed_over() -> None:
    trimmer = Trimmer()
    seen = [(1000, 0.0), (50, 1.0), (300, 2.0), (50, 3.0), (40, 7.9), (40, 8.1), (40, 20.0), (40, 30.0)]
    assert [trimmer.look(count, now) for count, now in seen] == [False] * 5 + [True, False, False]


def test_small_loads_are_left_alone() -> None:
    trimmer = Trimmer()
    assert not any(trimmer.look(count, now) for count, now in [(200, 0.0), (0, 1.0), (0, 100.0)])


def test_free_memory_can_be_returned_whatever_the_allocator() -> None:
    find_return_free()()


def test_a_checkout_runs_on_python_s_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONMALLOC", raising=False)
    assert find_allocator() == "pymalloc"


def test_the_benchmarks_start_the_gateway_with_the_image_s_allocator() -> None:
    settings = re.findall(r"\b((?:PYTHONMALLOC|MALLOC_CONF)=\S+)", DOCKERFILE.read_text(encoding="utf-8"))
    assert tuple(settings) == ALLOCATOR
