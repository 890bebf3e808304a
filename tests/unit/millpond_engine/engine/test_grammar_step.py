"""Steps under a grammar, with and without overlap, over the real scheduler and the fake runner: no library needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.unit.millpond_engine.engine.test_step import STORY, World, expect, make_request, make_world

from millpond_engine.core.scheduler import Scheduler
from millpond_engine.records.grammar import Guide, TokenMasks
from millpond_engine.records.request import BeamParams, FinishReason, RefusalReason
from millpond_engine.records.step import RowFailure

VOCABULARY = 100
ROW_BYTES = 13


@dataclass
class SumGuide:
    """Allows one token, which depends on all before it, so that a mask made too early or too late shows."""

    length: int
    fails_at: int = -1
    taken: list[int] = field(default_factory=list)
    failure: str = ""

    @property
    def next(self) -> int:
        return 10 + (7 * len(self.taken) + sum(self.taken)) % 80

    def advance(self, token: int) -> bool:
        assert token == self.next, "a token that its mask forbade"
        self.taken.append(token)
        if len(self.taken) == self.fails_at:
            self.failure = RowFailure.GRAMMAR
        return len(self.taken) >= self.length or bool(self.failure)


@dataclass
class SumGrammar:
    length: int
    fails_at: int = -1
    started: list[SumGuide] = field(default_factory=list)
    num_taken: int = 0
    failed: bool = False

    def start(self) -> SumGuide:
        self.started.append(SumGuide(self.length, self.fails_at))
        return self.started[-1]


class SumMasker:
    def __init__(self) -> None:
        self.num_masks = 0

    def make_masks(self, guides: Sequence[tuple[int, Guide]]) -> TokenMasks:
        self.num_masks += len(guides)
        bits = b"".join((1 << guide.next).to_bytes(ROW_BYTES, "little") for _, guide in guides)  # type: ignore[attr-defined]
        return TokenMasks(tuple(row for row, _ in guides), bits, ROW_BYTES)


def expect_sums(length: int) -> list[int]:
    guide = SumGuide(length)
    while not guide.advance(guide.next):
        pass
    return guide.taken


def make_guided_world(**options: Any) -> tuple[World, SumMasker]:
    world, masker = make_world(**options), SumMasker()
    world.engine._masker = masker
    return world, masker


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("num_blocks", "mode"), [(90, None), (16, "Recompute"), (16, "Swap")], ids=["roomy", "recompute", "swap"]
)
def test_rows_with_and_without_a_grammar_say_what_they_say_alone(
    overlap: bool, num_blocks: int, mode: str | None
) -> None:
    world, _ = make_guided_world(
        overlap=overlap, num_blocks=num_blocks, num_host_blocks=30, preemption=mode or "Auto"
    )
    prompts = {f"r{i}": tuple(range(2, 4 + i)) for i in range(8)}
    for number, (name, prompt) in enumerate(prompts.items()):
        grammar = SumGrammar(12 + number) if number % 2 else None
        assert world.engine.add(make_request(name, prompt, grammar=grammar)) is None
    world.run()
    for number, (name, prompt) in enumerate(prompts.items()):
        wanted = expect_sums(12 + number) if number % 2 else expect(STORY, prompt, 20)
        assert world.tokens[name, 0] == wanted
        assert world.finishes[name, 0] is FinishReason.STOP
    modes = {preempted.mode.value for preempted in world.preemptions}
    assert modes == ({mode.lower()} if mode else set())


@pytest.mark.parametrize("overlap", [False, True])
def test_a_grammar_that_is_cut_ends_by_length_and_one_that_ends_there_by_stop(overlap: bool) -> None:
    world, _ = make_guided_world(overlap=overlap)
    for name, length in (("cut", 9), ("whole", 6)):
        world.engine.add(make_request(name, (5, 6, 7), 6, grammar=SumGrammar(length)))
    world.run()
    assert world.tokens["cut", 0] == expect_sums(9)[:6]
    assert world.tokens["whole", 0] == expect_sums(6)
    assert (world.finishes["cut", 0], world.finishes["whole", 0]) == (FinishReason.LENGTH, FinishReason.STOP)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("best_of", [3, 5])
def test_every_sample_has_a_guide_of_its_own(overlap: bool, best_of: int) -> None:
    world, grammar = make_guided_world(overlap=overlap)[0], SumGrammar(8)
    world.engine.add(make_request("n", (5, 6, 7), n=3, best_of=best_of, grammar=grammar))
    world.run()
    assert [world.tokens["n", index] for index in range(3)] == [expect_sums(8)] * 3
    assert len(grammar.started) == best_of


def test_with_overlap_a_constrained_sequence_still_gets_a_token_every_step() -> None:
    world, masker = make_guided_world(overlap=True)
    world.engine.add(make_request("bound", (8, 9, 10), grammar=SumGrammar(12)))
    world.run()
    assert masker.num_masks == 12
    assert (
        world.num_steps <= 12 + 3
    )  # one fills the pipe, one was planned before the end was known, one drains it


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_fails_takes_its_guides_along_and_later_ones_run(overlap: bool) -> None:
    world, _ = make_guided_world(overlap=overlap, faults=(4,))
    world.engine.add(make_request("lost", (5, 6, 7), grammar=SumGrammar(12)))
    world.run()
    assert world.finishes["lost", 0] is FinishReason.ERROR
    world.engine.add(make_request("fine", (5, 6, 7), grammar=SumGrammar(5)))
    world.run()
    assert world.tokens["fine", 0] == expect_sums(5)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_guide_that_cannot_go_on_fails_its_sequence_alone(overlap: bool) -> None:
    world, _ = make_guided_world(overlap=overlap)
    world.engine.add(make_request("bad", (5, 6, 7), grammar=SumGrammar(12, fails_at=4)))
    world.engine.add(make_request("fine", (8, 9), grammar=SumGrammar(7)))
    world.run()
    assert (world.finishes["bad", 0], len(world.tokens["bad", 0])) == (FinishReason.ERROR, 3)
    assert world.tokens["fine", 0] == expect_sums(7)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_aborted_sequence_is_asked_for_no_mask(overlap: bool) -> None:
    world, masker = make_guided_world(overlap=overlap)
    world.engine.add(make_request("gone", (5, 6, 7), grammar=SumGrammar(20)))
    for _ in range(5):
        world.step()
    assert world.engine.abort("gone")
    before = masker.num_masks
    world.run()
    assert masker.num_masks == before


def test_a_beam_search_cannot_follow_a_grammar() -> None:
    world, _ = make_guided_world(overlap=False)
    scheduler = world.engine.scheduler
    assert isinstance(scheduler, Scheduler)
    refusal = world.engine.add(make_request("b", (5, 6), n=2, beam=BeamParams(2), grammar=SumGrammar(3)))
    assert refusal is not None
    assert refusal.reason is RefusalReason.INVALID_VALUE
