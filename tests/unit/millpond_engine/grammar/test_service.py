"""Compiling beside the event loop: bounded, fair between tenants, and nobody waits for another's defect."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from millpond_engine.engine.step import Masker
from millpond_engine.grammar.cache import MAX_TOKENS
from millpond_engine.grammar.service import GrammarLimits, GrammarService
from millpond_engine.grammar.spec import GrammarBusyError, GrammarError, GrammarKind, GrammarSpec
from millpond_engine.records.grammar import Guide, TokenMasks


class PanicException(BaseException):
    """As pyo3 names what a panic of the library becomes."""


@dataclass
class Compiled:
    text: str
    num_taken: int = 0
    failed: bool = False

    def start(self) -> Guide:
        raise AssertionError


@dataclass
class SlowLibrary(Masker):
    """Compiles a text that begins with `slow` once it is let go; notes who was compiled when."""

    go: threading.Event = field(default_factory=threading.Event)
    order: list[str] = field(default_factory=list)

    def compile(self, spec: GrammarSpec, *, vocabulary: int, ends: tuple[int, ...]) -> Compiled:
        self.order.append(spec.text)
        if spec.text.startswith("slow"):
            assert self.go.wait(60)
        if spec.text == "bad":
            raise GrammarError("it is bad")
        if spec.text == "panic":
            raise PanicException
        if spec.text == "odd":
            raise ValueError("an odd\ntext")
        return Compiled(spec.text)

    def make_masks(self, guides: object) -> TokenMasks:
        return TokenMasks()


class World:
    def __init__(self, **limits: float) -> None:
        self.library = SlowLibrary()
        self.service = GrammarService(self.library, GrammarLimits(**limits))  # type: ignore[arg-type]

    def get(self, text: str, tenant: str = "t") -> asyncio.Task[Compiled]:
        spec = GrammarSpec(GrammarKind.REGEX, text)
        return asyncio.create_task(self.service.get(spec, tenant=tenant, vocabulary=9, ends=()))  # type: ignore[arg-type]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.002)


async def test_a_slow_grammar_keeps_its_own_tenant_waiting_and_nobody_else() -> None:
    world = World(num_threads=2)
    slow, behind = world.get("slow"), world.get("quick")
    await world.until(lambda: world.library.order == ["slow"])
    assert (await world.get("other", "u")).text == "other"
    assert (await world.get("third", "v")).text == "third"
    assert not slow.done()
    assert not behind.done()
    world.library.go.set()
    assert [(await task).text for task in (slow, behind)] == ["slow", "quick"]


async def test_the_same_grammar_is_compiled_once_for_a_tenant_and_again_for_another() -> None:
    world = World()
    world.library.go.set()
    texts = [(await task).text for task in [world.get("slow same") for _ in range(8)]]
    assert texts == ["slow same"] * 8
    assert world.library.order == ["slow same"]
    await world.get("slow same", "u")
    assert world.library.order == ["slow same"] * 2


@pytest.mark.parametrize(
    ("text", "word"), [("bad", "it is bad"), ("panic", "library failed"), ("odd", "an odd")]
)
async def test_a_failure_is_the_authors_and_is_kept(text: str, word: str) -> None:
    world = World()
    for _ in range(3):
        with pytest.raises(GrammarError, match=word):
            await world.get(text)
    assert world.library.order == [text]


async def test_one_that_takes_too_long_is_refused_and_found_once_it_is_ready() -> None:
    world = World(compile_seconds=0.05)
    with pytest.raises(GrammarError, match="more than"):
        await world.get("slow")
    world.library.go.set()
    await world.until(lambda: world.service.num_kept == 1)
    assert (await world.get("slow")).text == "slow"
    assert world.library.order == ["slow"]


async def test_threads_that_are_all_taken_make_the_next_come_back() -> None:
    world = World(num_threads=1, compile_seconds=0.05)
    with pytest.raises(GrammarError):
        await world.get("slow")
    with pytest.raises(GrammarBusyError):
        await world.get("quick", "u")
    world.library.go.set()
    await world.until(lambda: world.service.num_kept == 1)
    assert (await world.get("quick", "u")).text == "quick"


async def test_waiting_is_bounded_for_a_tenant_and_for_all() -> None:
    world = World(max_waiting=4, max_waiting_per_tenant=3)
    tasks = [world.get("slow 0")]
    await world.until(lambda: bool(world.library.order))
    tasks += [world.get(f"slow {i}") for i in (1, 2)]
    await asyncio.sleep(0)
    with pytest.raises(GrammarBusyError):
        await world.get("slow 3")
    tasks.append(world.get("slow u", "u"))
    await asyncio.sleep(0)
    with pytest.raises(GrammarBusyError):
        await world.get("quick", "v")
    world.library.go.set()
    assert len([await task for task in tasks]) == 4
    assert (await world.get("quick", "v")).text == "quick"


async def test_a_worn_grammar_is_compiled_anew() -> None:
    world = World()
    world.library.go.set()
    first = await world.get("x")
    first.num_taken = MAX_TOKENS
    assert await world.get("x") is first
    first.num_taken += 1
    second = await world.get("x")
    assert second is not first
    second.failed = True
    assert await world.get("x") is not second
    assert world.library.order == ["x"] * 3


async def test_who_leaves_while_waiting_leaves_no_trace() -> None:
    world = World()
    first, second = world.get("slow"), world.get("next")
    await world.until(lambda: bool(world.library.order))
    for task in (first, second):
        task.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    world.library.go.set()
    await world.until(lambda: world.service.num_kept == 1)
    assert (await world.get("after")).text == "after"
    assert world.library.order == ["slow", "after"]
    assert not world.service._lanes
    assert not world.service._waiting
