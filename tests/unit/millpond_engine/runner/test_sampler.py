"""The sampler over a stand-in for the vocabulary product: slices, reports, failures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from millpond_engine.kernels.reference import ReferenceOps
from millpond_engine.records.request import SamplingParams
from millpond_engine.records.step import NewRow, RowFailure, RowStep
from millpond_engine.runner.rows import RowTable
from millpond_engine.runner.sampler import SLICE_BYTES, SampledStep, Sampler
from millpond_engine.runner.sampling_table import SamplingTable


class Product:
    """Hidden states `[n, vocabulary or 1]` stand for their own scores; remembers the largest slice."""

    def __init__(self, vocabulary: int, make: Any = None) -> None:
        self.config = SimpleNamespace(vocabulary_size=vocabulary)
        self.ops = ReferenceOps()
        self.largest_bytes = 0
        self._make = make

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        made = self._make(hidden) if self._make else hidden.clone()
        self.largest_bytes = max(self.largest_bytes, made.nbytes)
        return made


class World:
    def __init__(self, product: Product, *, max_tokens: int = 64) -> None:
        self.rows = RowTable(max_tokens=max_tokens, block_tokens=16)
        self.table = SamplingTable()
        self.sampler = Sampler(self.rows, self.table, product)  # type: ignore[arg-type]

    def add(
        self, row: int, sampling: SamplingParams, tokens: tuple[int, ...] = (1, 2, 3), **options: Any
    ) -> None:
        new = NewRow(row, sampling, 9, tokens, len(tokens), (0,), **options)
        self.rows._add(new)
        self.table.add(new)

    def sample(self, hidden: torch.Tensor, **options: Any) -> SampledStep:
        out = SampledStep()
        self.sampler.sample([RowStep(row, 2, 1, **options) for row in range(hidden.shape[0])], hidden, out)
        return out


GREEDY = SamplingParams(temperature=0.0)


def test_logprobs_are_of_the_raw_distribution_and_ranks_count_from_one() -> None:
    world = World(Product(6))
    world.add(0, SamplingParams(temperature=0.0, num_logprobs=2, logit_bias=((4, 100.0),)))
    hidden = torch.tensor([[3.0, 1.0, 2.0, 0.0, -1.0, -9.0]])
    [result] = world.sample(hidden).rows
    raw = hidden[0].log_softmax(-1)
    assert result.token == 4
    assert result.logprobs is not None
    assert result.logprobs.rank == 5
    assert result.logprobs.logprob == pytest.approx(float(raw[4]))
    assert [token for token, _ in result.logprobs.top] == [0, 2]
    assert [value for _, value in result.logprobs.top] == pytest.approx([float(raw[0]), float(raw[2])])


def test_rows_with_and_without_reports_keep_their_own() -> None:
    world = World(Product(4))
    world.add(0, GREEDY)
    world.add(1, SamplingParams(temperature=0.0, num_logprobs=0))
    world.add(2, SamplingParams(temperature=0.0, num_logprobs=3))
    results = world.sample(torch.tensor([[0.0, 1, 2, 3], [3, 2, 1, 0], [0, 5, 0, 0]])).rows
    assert [result.token for result in results] == [3, 0, 1]
    assert [result.logprobs and len(result.logprobs.top) for result in results] == [None, 0, 3]


def test_not_a_number_fails_its_row_alone_on_both_paths() -> None:
    for sampling in (GREEDY, SamplingParams(temperature=1.0)):
        world = World(Product(4))
        for row in range(3):
            world.add(row, sampling)
        for broken in (float("nan"), float("inf")):
            hidden = torch.zeros(3, 4)
            hidden[1, 2] = broken
            out = world.sample(hidden)
            assert [result.row for result in out.rows] == [0, 2]
            assert out.failed == {1: RowFailure.NOT_NUMBERS}


def test_nothing_left_to_choose_fails_its_row_alone() -> None:
    world = World(Product(4))
    world.add(0, GREEDY)
    world.add(1, SamplingParams(temperature=0.0, allowed_token_ids=(2,)), stop_token_ids=(2,), min_tokens=5)
    out = world.sample(torch.zeros(2, 4))
    assert [result.row for result in out.rows] == [0]
    assert out.failed == {1: RowFailure.NO_CHOICE}


def test_a_model_that_overflows_is_never_blamed_on_the_caller() -> None:
    for sampling in (GREEDY, SamplingParams(temperature=1.0, presence_penalty=1.0, num_logprobs=1)):
        for value in (float("inf"), float("nan")):
            world = World(Product(4))
            world.add(0, sampling)
            assert world.sample(torch.full((1, 4), value)).failed == {0: RowFailure.NOT_NUMBERS}
    world = World(Product(4))
    world.add(0, GREEDY)
    assert world.sample(torch.full((1, 4), -float("inf"))).failed == {0: RowFailure.NOT_NUMBERS}


def test_branches_are_reported_instead_of_a_token() -> None:
    world = World(Product(4))
    world.add(0, GREEDY)
    scores = torch.tensor([[1.0, 4.0, 2.0, 3.0]])
    [result] = world.sample(scores, num_branches=3).rows
    assert result.token is None
    assert [token for token, _ in result.branches] == [1, 3, 2]
    assert result.branches[0][1] == pytest.approx(float(scores.log_softmax(-1)[0, 1]))
    assert world.rows.length(0) == 3


def test_a_sampled_token_is_in_the_row_for_the_next_step() -> None:
    world = World(Product(4))
    world.add(0, GREEDY)
    world.sample(torch.tensor([[0.0, 0, 7, 0]]))
    _, tokens = world.rows.inputs((RowStep(0, 3, 1),))
    assert tokens.tolist() == [2]


def test_eng_053_a_one_token_prompt_has_no_following_prompt_token() -> None:
    world = World(Product(4))
    world.add(0, SamplingParams(temperature=0.0, num_prompt_logprobs=1), (2,))
    assert world.sampler.prompt_logprobs(RowStep(0, 0, 1, prompt_logprobs=True), torch.zeros(1, 4)) == ()


def test_eng_054_prompt_logprobs_of_a_long_prompt_stay_within_a_slice() -> None:
    product = Product(150_000, make=lambda hidden: torch.zeros(hidden.shape[0], 150_000))
    world = World(product, max_tokens=400)
    world.add(0, SamplingParams(temperature=0.0, num_prompt_logprobs=1), tuple(range(300)))
    found = world.sampler.prompt_logprobs(RowStep(0, 0, 300, prompt_logprobs=True), torch.zeros(300, 1))
    assert len(found) == 299
    assert 0 < product.largest_bytes <= SLICE_BYTES


def test_eng_055_a_thousand_sequences_of_a_large_vocabulary_stay_within_a_slice() -> None:
    product = Product(150_000, make=lambda hidden: hidden.expand(-1, 150_000).contiguous())
    world = World(product)
    for row in range(1024):
        world.add(row, GREEDY)
    out = world.sample(torch.zeros(1024, 1))
    assert len(out.rows) == 1024
    assert 0 < product.largest_bytes <= SLICE_BYTES
