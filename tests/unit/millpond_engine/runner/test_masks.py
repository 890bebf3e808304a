"""Masks in the choice of tokens: with every other parameter, in slices, beside rows without, on several ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.millpond_engine.runner.conftest import make_runner
from tests.unit.millpond_engine.runner.test_sampler import GREEDY, Product, World

from millpond_engine.records.grammar import TokenMasks
from millpond_engine.records.request import SamplingParams
from millpond_engine.records.step import NewRow, RowFailure, RowStep, StepPlan
from millpond_engine.runner.masks import NO_MASKS, RowMasks
from millpond_engine.runner.sampler import SampledStep

VOCABULARY = 50


def make_masks(allowed: dict[int, set[int]], row_bytes: int = 8) -> TokenMasks:
    bits = b"".join(
        sum(1 << token for token in tokens).to_bytes(row_bytes, "little") for tokens in allowed.values()
    )
    return TokenMasks(tuple(allowed), bits, row_bytes)


def sample(world: World, hidden: torch.Tensor, masks: RowMasks) -> SampledStep:
    out = SampledStep()
    world.sampler.sample([RowStep(row, 2, 1) for row in range(hidden.shape[0])], hidden, out, masks)
    return out


EVERYTHING = SamplingParams(
    temperature=1.3,
    top_p=0.9,
    top_k=9,
    min_p=0.01,
    presence_penalty=1.0,
    frequency_penalty=-1.0,
    repetition_penalty=0.7,
    logit_bias=((1, 100.0), (40, -100.0)),
    bad_words=((6,),),
    num_logprobs=3,
)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.0), EVERYTHING])
def test_a_row_with_a_mask_chooses_among_what_it_allows_whatever_the_rest_says(
    sampling: SamplingParams,
) -> None:
    torch.manual_seed(3)
    rng = random.Random(3)
    for _ in range(40):
        world = World(Product(VOCABULARY))
        allowed = {row: set(rng.sample(range(VOCABULARY), 6)) for row in (0, 2, 3)}
        for row in range(5):
            world.add(row, sampling, constrained=row in allowed)
        for result in sample(world, 4 * torch.randn(5, VOCABULARY), RowMasks(make_masks(allowed))).rows:
            assert result.token in allowed.get(result.row, set(range(VOCABULARY)))
            assert not (sampling.bad_words and result.token == 6)


def test_rows_without_a_mask_choose_as_they_do_alone() -> None:
    torch.manual_seed(5)
    hidden = 3 * torch.randn(4, VOCABULARY)
    free, mixed = World(Product(VOCABULARY)), World(Product(VOCABULARY))
    for row in range(4):
        free.add(row, EVERYTHING)
        mixed.add(row, EVERYTHING, constrained=row % 2 == 0)
    alone = {r.row: r for r in sample(free, hidden, NO_MASKS).rows}
    beside = {r.row: r for r in sample(mixed, hidden, RowMasks(make_masks({0: {3}, 2: {4}}))).rows}
    assert [beside[row] for row in (1, 3)] == [alone[row] for row in (1, 3)]
    assert [beside[row].token for row in (0, 2)] == [3, 4]


def test_log_probabilities_are_of_the_distribution_before_the_mask() -> None:
    world = World(Product(6))
    world.add(0, SamplingParams(temperature=0.0, num_logprobs=1), constrained=True)
    hidden = torch.tensor([[3.0, 1.0, 2.0, 0.0, -1.0, -9.0]])
    [result] = sample(world, hidden, RowMasks(make_masks({0: {3}}, 1))).rows
    assert result.token == 3
    assert result.logprobs is not None
    assert result.logprobs.rank == 4
    assert result.logprobs.logprob == pytest.approx(float(hidden.log_softmax(-1)[0, 3]), abs=1e-5)
    assert result.logprobs.top[0][0] == 0


def test_a_mask_that_leaves_nothing_fails_its_row_alone() -> None:
    world = World(Product(VOCABULARY))
    for row in range(3):
        world.add(row, GREEDY, constrained=row < 2)
    out = sample(world, torch.randn(3, VOCABULARY), RowMasks(make_masks({0: set(), 1: {7}})))
    assert out.failed == {0: RowFailure.NO_CHOICE}
    assert {r.row for r in out.rows} == {1, 2}


def test_ends_below_the_least_output_are_banned_under_a_mask_too() -> None:
    world = World(Product(VOCABULARY))
    world.add(0, GREEDY, constrained=True, stop_token_ids=(9,), min_tokens=5)
    hidden = torch.zeros(1, VOCABULARY)
    hidden[0, 9] = 5
    [result] = sample(world, hidden, RowMasks(make_masks({0: {8, 9}}))).rows
    assert result.token == 8


@pytest.mark.parametrize("row_bytes", [2, 7, 8])
def test_masks_may_be_shorter_or_longer_than_the_models_vocabulary(row_bytes: int) -> None:
    masks = RowMasks(make_masks({4: {0, 9}}, row_bytes))
    banned = masks.list_banned(np.array([4]), VOCABULARY)
    assert banned.shape == (1, VOCABULARY)
    assert set(np.nonzero(~banned[0])[0].tolist()) == {0, 9}


def run_steps(runner: Any, allowed: list[set[int]]) -> list[tuple[list[tuple[int, Any]], dict[int, str]]]:
    """A prompt and decodes of three rows of which the middle one has a mask each step."""
    sampling = replace(EVERYTHING, logit_bias=(), bad_words=())
    news = tuple(
        NewRow(row, sampling, 7 + row, tuple(range(5, 14)), 9, (2 * row, 2 * row + 1), constrained=row == 1)
        for row in range(3)
    )
    found = []
    for step, tokens in enumerate(allowed):
        rows = tuple(RowStep(row, 0 if step == 0 else 8 + step, 9 if step == 0 else 1) for row in range(3))
        pending = runner.launch(StepPlan(step, rows, news if step == 0 else (), constrained=(1,)))
        pending.choose(make_masks({1: tokens}, 32))
        result = pending.result()
        assert next(r.token for r in result.rows if r.row == 1) in tokens
        found.append(([(r.row, r.token) for r in result.rows], result.failed_rows))
    return found


def test_ranks_choose_alike_under_masks(tiny_model: Callable[[str], Any]) -> None:
    path: Path = tiny_model("llama-groups")[0]
    rng = random.Random(8)
    allowed = [set(rng.sample(range(211), 12)) for _ in range(6)]
    alone = run_steps(make_runner(path, blocks=20), allowed)
    runner = make_runner(path, blocks=20, tensor_parallel_size=2)
    try:
        assert run_steps(runner, allowed) == alone
    finally:
        runner.close()
