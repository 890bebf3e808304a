"""Changes to logits before the choice, each against its formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from millpond_engine.records.request import SamplingParams
from millpond_engine.records.step import NewRow
from millpond_engine.runner.edits import completes, edit_logits

TOKENS = np.array([5, 6, 5, 7, 7, 7, 2], np.int32)
"""Four of the prompt, three generated."""


def _edit(**options: Any) -> torch.Tensor:
    row = {name: options.pop(name) for name in ("stop_token_ids", "min_tokens") if name in options}
    logits = torch.tensor([1.0, -1.0, 2.0, 0.5, -0.5, 3.0, -3.0, 4.0])
    edit_logits(logits, NewRow(0, SamplingParams(**options), 0, (), 4, (), **row), TOKENS)
    return logits


def test_repetition_counts_prompt_and_output_once() -> None:
    expected = [1.0, -1.0, 1.0, 0.5, -0.5, 1.5, -6.0, 2.0]
    assert _edit(repetition_penalty=2.0).tolist() == expected


def test_presence_and_frequency_count_generated_tokens() -> None:
    assert _edit(presence_penalty=0.5)[[2, 5, 7]].tolist() == [1.5, 3.0, 3.5]
    assert _edit(frequency_penalty=0.5)[[2, 5, 7]].tolist() == [1.5, 3.0, 3.0]


def test_bias_is_added() -> None:
    assert _edit(logit_bias=((0, 5.0), (7, -100.0)))[[0, 7]].tolist() == [6.0, -96.0]


def test_only_allowed_tokens_are_left() -> None:
    assert torch.isfinite(_edit(allowed_token_ids=(1, 6))).nonzero().flatten().tolist() == [1, 6]


@pytest.mark.parametrize(("generated", "banned"), [(2, False), (3, False), (4, True)])
def test_end_tokens_are_banned_below_min_tokens(generated: int, banned: bool) -> None:
    logits = _edit(stop_token_ids=(3, 4), min_tokens=generated)
    assert bool(torch.isinf(logits[[3, 4]]).all()) is banned


@pytest.mark.parametrize(
    ("word", "completed"),
    [
        ((4,), True),
        ((2, 4), True),
        ((7, 2, 4), True),
        ((6, 2, 4), False),
        ((5, 6, 5, 7, 7, 7, 2, 4), True),
        ((1,) * 9, False),
    ],
)
def test_a_bad_word_is_banned_where_it_would_be_completed(word: tuple[int, ...], completed: bool) -> None:
    assert completes(word, TOKENS) is completed
    assert bool(torch.isinf(_edit(bad_words=(word,))).any()) is completed
