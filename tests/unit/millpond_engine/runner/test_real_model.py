"""The real model against transformers in float32: the same tokens however the work is cut."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.support.plan_driver import PlanDriver, generate

from millpond_engine.records.request import SamplingParams

pytestmark = pytest.mark.model

CHAT = (1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198, 1,
        4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198)  # fmt: skip
"""The chat template around "What is the capital of France?"."""
WANTED = 10


def _prompts() -> list[tuple[int, ...]]:
    rng = random.Random(11)
    return [CHAT, *(tuple(rng.randrange(17, 49000) for _ in range(length)) for length in (1, 15, 16, 17, 70))]


@pytest.fixture(scope="module")
def expected(smollm2_oracle: Any) -> list[list[int]]:
    import torch

    found = []
    for prompt in _prompts():
        out = smollm2_oracle.generate(
            torch.tensor([prompt]), max_new_tokens=WANTED, min_new_tokens=WANTED, do_sample=False, pad_token_id=2,
            eos_token_id=None,
        )  # fmt: skip
        found.append(out[0, len(prompt) :].tolist())
    return found


def test_the_capital_of_france(smollm2: Any) -> None:
    # "The capital of France is Paris.<|im_end|>"
    assert generate(smollm2, [CHAT], 8) == [[504, 3575, 282, 4649, 314, 7042, 30, 2]]


def test_eng_025_greedy_equals_transformers_alone_and_again(smollm2: Any, expected: list[list[int]]) -> None:
    for prompt, tokens in zip(_prompts(), expected, strict=True):
        driver = PlanDriver(smollm2)
        first = driver.add(prompt, WANTED)
        driver.run()
        again = driver.add(prompt, WANTED)
        driver.run()
        assert first.output == tokens
        assert again.output == tokens


@pytest.mark.parametrize("budget", [4096, 33, 7])
def test_greedy_equals_transformers_in_a_batch_and_chunked(
    smollm2: Any, expected: list[list[int]], budget: int
) -> None:
    assert generate(smollm2, _prompts(), WANTED, budget) == expected


def test_greedy_after_recompute_and_after_swap(smollm2: Any, expected: list[list[int]]) -> None:
    driver = PlanDriver(smollm2, poison=True)
    rows = [driver.add(prompt, WANTED) for prompt in _prompts()]
    for _ in range(4):
        driver.step()
    driver.recompute(rows[4])
    driver.swap(rows[0])
    driver.swap(rows[3])
    driver.run()
    assert [row.output for row in rows] == expected


def test_a_fork_shares_full_blocks_and_leaves_its_source_alone(
    smollm2: Any, expected: list[list[int]]
) -> None:
    driver = PlanDriver(smollm2)
    row = driver.add(_prompts()[4], WANTED)
    for _ in range(3):
        driver.step()
    twin = driver.fork(row, WANTED, row.sampling, 1)
    other = driver.fork(
        row, WANTED, SamplingParams(temperature=0.0, logit_bias=((expected[4][4], -100.0),)), 2
    )
    driver.run()
    assert row.output == twin.output == expected[4]
    assert other.output[:4] == expected[4][:4]
    assert other.output[4] != expected[4][4]


def test_logprobs_equal_those_of_transformers(smollm2: Any, smollm2_oracle: Any) -> None:
    import torch

    driver = PlanDriver(smollm2)
    row = driver.add(CHAT, 3, SamplingParams(temperature=0.0, num_logprobs=5, num_prompt_logprobs=2))
    driver.run(budget=10)
    with torch.no_grad():
        logits = smollm2_oracle(torch.tensor([row.tokens])).logits[0].log_softmax(-1)
    reported = [entry for result in row.results for entry in result.prompt_logprobs]
    assert len(reported) == len(CHAT) - 1
    for position, entry in enumerate(reported):
        assert entry.logprob == pytest.approx(float(logits[position, CHAT[position + 1]]), abs=2e-3)
        assert [token for token, _ in entry.top] == logits[position].topk(2).indices.tolist()
    chosen = [result for result in row.results if result.token is not None]
    for position, result in enumerate(chosen, len(CHAT) - 1):
        assert result.logprobs is not None
        assert result.logprobs.rank == 1
        best = logits[position].topk(5)
        assert [value for _, value in result.logprobs.top] == pytest.approx(best.values.tolist(), abs=2e-3)
