"""Two hundred prompts of the real model against transformers in float32: `make test-model`, some ten minutes.

Not collected by default because of its length; the default tests hold a sample of the same comparisons.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tests.support.engine_driver import EngineDriver
from tests.unit.millpond_engine.runner.conftest import make_runner

pytestmark = [pytest.mark.model, pytest.mark.timeout(3600)]

NUM_PROMPTS = 200
WANTED = 16


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    rng = random.Random(2026)
    lengths = [rng.choice([rng.randint(1, 40), rng.randint(40, 130), 16, 32, 64]) for _ in range(NUM_PROMPTS)]
    made = [tuple(rng.randrange(17, 49_000) for _ in range(length)) for length in lengths]
    for index in range(0, NUM_PROMPTS, 10):  # some share a prefix
        made[index] = made[(index + 5) % NUM_PROMPTS] + made[index][:8]
    return made


@pytest.fixture(scope="module")
def expected(prompts: list[tuple[int, ...]], smollm2_oracle: Any) -> list[list[int]]:
    import torch

    found = []
    for prompt in prompts:
        out = smollm2_oracle.generate(
            torch.tensor([prompt]), max_new_tokens=WANTED, do_sample=False, eos_token_id=None, pad_token_id=2
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


def _run(
    runner: Any, prompts: list[tuple[int, ...]], **settings: Any
) -> tuple[list[list[int]], EngineDriver]:
    driver = EngineDriver(runner, **settings)
    ids = [driver.add(prompt, WANTED) for prompt in prompts]
    driver.run()
    return [driver.tokens(request_id) for request_id in ids], driver


@pytest.fixture(scope="module")
def runner(smollm2_gguf: Path) -> Any:
    return make_runner(smollm2_gguf, blocks=600, host_blocks=100)


def test_each_alone(runner: Any, prompts: list[tuple[int, ...]], expected: list[list[int]]) -> None:
    assert [_run(runner, [prompt])[0][0] for prompt in prompts] == expected


def test_all_in_one_batch_with_prefix_hits(
    runner: Any, prompts: list[tuple[int, ...]], expected: list[list[int]]
) -> None:
    found, driver = _run(runner, prompts)
    assert found == expected
    assert driver.scheduler.counts().prefix_hit_tokens > 0


@pytest.mark.parametrize("budget", [1, 7, 100])
def test_chunked(runner: Any, prompts: list[tuple[int, ...]], expected: list[list[int]], budget: int) -> None:
    few = 4 if budget == 1 else 40
    assert _run(runner, prompts[:few], max_batch_tokens=budget)[0] == expected[:few]


@pytest.mark.parametrize("mode", ["Swap", "Recompute"])
def test_preempted(
    smollm2_gguf: Path, prompts: list[tuple[int, ...]], expected: list[list[int]], mode: str
) -> None:
    small = make_runner(smollm2_gguf, blocks=14, host_blocks=60)
    found, driver = _run(small, prompts[:60], preemption=mode)
    assert found == expected[:60]
    assert {event.mode.value for event in driver.preemptions} == {mode.lower()}


def test_four_choices(runner: Any, prompts: list[tuple[int, ...]], expected: list[list[int]]) -> None:
    driver = EngineDriver(runner)
    ids = [driver.add(prompt, WANTED, n=4) for prompt in prompts[:20]]
    driver.run()
    for request_id, tokens in zip(ids, expected[:20], strict=True):
        assert [driver.tokens(request_id, index) for index in range(4)] == [tokens] * 4


def test_bfloat16_agreement_is_stated(
    smollm2_gguf: Path,
    prompts: list[tuple[int, ...]],
    expected: list[list[int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """First tokens in bfloat16 against float32; random-token prompts are the hard case: their next token is unclear."""
    found, _ = _run(make_runner(smollm2_gguf, blocks=600, dtype="BFloat16"), prompts)
    same = sum(ours[0] == theirs[0] for ours, theirs in zip(found, expected, strict=True)) / NUM_PROMPTS
    with capsys.disabled():
        print(f"\nbfloat16 agrees with float32 on {same:.1%} of first tokens")
    assert same > 0.8
