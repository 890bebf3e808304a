"""Tiny random models of every family and rotary variant, from sharded safetensors, against transformers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from tests.fixtures.models import TINY
from tests.support.plan_driver import PlanDriver

from millpond_engine.records.request import SamplingParams

LENGTH = 120
"""Longer than the original context of the scaled variants, so that scaling shows."""


@pytest.mark.parametrize("variant", sorted(TINY))
def test_logits_of_every_position_equal_transformers(
    variant: str, tiny_model: Callable[[str], Any], runner_of: Callable[..., Any]
) -> None:
    import torch

    directory, oracle = tiny_model(variant)
    prompt = [random.Random(3).randrange(211) for _ in range(LENGTH)]
    driver = PlanDriver(runner_of(directory, blocks=32, block_tokens=8))
    row = driver.add(prompt, 4, SamplingParams(temperature=0.0, num_logprobs=211, num_prompt_logprobs=211))
    driver.run(budget=50)
    with torch.no_grad():
        expected = oracle(torch.tensor([row.tokens])).logits[0].log_softmax(-1)
    entries = [entry for result in row.results for entry in result.prompt_logprobs]
    entries += [result.logprobs for result in row.results if result.logprobs]
    assert len(entries) == LENGTH - 1 + 4
    for position, entry in enumerate(entries):
        found = torch.tensor([value for _, value in sorted(entry.top)])
        torch.testing.assert_close(found, expected[position], atol=2e-3, rtol=1e-3)


def test_a_longer_context_than_the_model_supports_is_lowered(
    tiny_model: Callable[[str], Any], runner_of: Callable[..., Any]
) -> None:
    assert runner_of(tiny_model("qwen2")[0], max_model_tokens=100_000).info.max_model_tokens == 256
    assert runner_of(tiny_model("llama-linear")[0], max_model_tokens=100_000).info.max_model_tokens == 1024
