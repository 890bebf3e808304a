"""Shared cases that need scheduler and runner together, over tiny models on the compiled kernels."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.engine_driver import EngineDriver
from tests.support.plan_driver import PlanDriver

from millpond_engine.records.request import BeamParams, SamplingParams

BLOCK = 16
CHUNK = 40
LENGTHS = sorted({1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, CHUNK - 1, CHUNK, CHUNK + 1})
REPORTING = SamplingParams(temperature=0.0, num_logprobs=3)


@pytest.fixture(scope="module")
def tiny(tiny_model: Callable[[str], Any], runner_of: Callable[..., Any]) -> Any:
    """A tiny model whose sizes the compiled kernels run."""
    return runner_of(tiny_model("llama-vectors")[0], blocks=64, host_blocks=16)


def _prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length}-{seed}")
    return [rng.randrange(4, 211) for _ in range(length)]


def _outcome(row: Any) -> list[Any]:
    return [(result.token, result.logprobs) for result in row.results if result.token is not None]


@pytest.mark.parametrize("budget", [1, BLOCK, CHUNK])
@pytest.mark.parametrize("history", ["cold", "warm", "recomputed", "swapped"])
def test_eng_040_every_length_history_and_budget_gives_the_same_tokens_and_logprobs(
    tiny: Any, budget: int, history: str
) -> None:
    for length in LENGTHS:
        prompt = _prompt(length)
        plain = PlanDriver(tiny)
        expected = plain.add(prompt, 5, REPORTING)
        plain.run()
        driver = PlanDriver(tiny, poison=True)
        if history == "warm":
            first = driver.add(prompt, 2, REPORTING)
            driver.run(budget)
            row = driver.add(prompt, 5, REPORTING)
            row.computed = (length - 1) // BLOCK * BLOCK
            row.blocks = first.blocks[: row.computed // BLOCK]
        else:
            row = driver.add(prompt, 5, REPORTING)
            while len(row.output) < 2:
                driver.step(budget)
            if history == "recomputed":
                driver.recompute(row)
            if history == "swapped":
                driver.swap(row)
        driver.run(budget)
        assert _outcome(row) == _outcome(expected), f"length {length}"


def test_eng_026_no_nan_of_freed_blocks_reaches_an_output(
    tiny_model: Callable[[str], Any], runner_of: Callable[..., Any]
) -> None:
    runner = runner_of(tiny_model("llama-vectors")[0], blocks=12, host_blocks=8)
    rng = random.Random(5)
    prompts = [_prompt(rng.randrange(1, 60), seed) for seed in range(30)]
    driver = EngineDriver(runner, poison=True, max_batch_tokens=48)
    ids = [driver.add(prompt, rng.randrange(40, 100), REPORTING) for prompt in prompts]
    driver.run()
    assert driver.preemptions
    for request_id in ids:
        assert all(entry.logprob == entry.logprob for entry in driver.choices[request_id][0].logprobs)


@pytest.mark.parametrize("mode", ["Swap", "Recompute"])
def test_preempted_requests_get_the_tokens_of_an_undisturbed_run(
    tiny_model: Callable[[str], Any], runner_of: Callable[..., Any], tiny: Any, mode: str
) -> None:
    prompts = [_prompt(length, 3) for length in (30, 45, 17, 33, 50, 8)]
    undisturbed = []
    for prompt in prompts:
        driver = EngineDriver(tiny)
        undisturbed.append(driver.add(prompt, 30))
        driver.run()
        undisturbed[-1] = driver.tokens(undisturbed[-1])  # type: ignore[call-overload]
    runner = runner_of(tiny_model("llama-vectors")[0], blocks=14, host_blocks=24)
    driver = EngineDriver(runner, preemption=mode, max_batch_tokens=64)
    ids = [driver.add(prompt, 30) for prompt in prompts]
    driver.run()
    assert {event.mode.value for event in driver.preemptions} == {mode.lower()}
    assert [driver.tokens(request_id) for request_id in ids] == undisturbed


@pytest.mark.parametrize("length_penalty", [0.5, 1.0, 2.0])
def test_eng_042_beams_equal_transformers_generate(
    tiny: Any, tiny_model: Callable[[str], Any], length_penalty: float
) -> None:
    import torch

    _, oracle = tiny_model("llama-vectors")
    for seed in range(3):
        prompt = _prompt(12, seed)
        expected = oracle.generate(
            torch.tensor([prompt]), num_beams=4, num_return_sequences=4, length_penalty=length_penalty, max_new_tokens=14,
            do_sample=False, eos_token_id=[3, 50, 51, 52], pad_token_id=0, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        driver = EngineDriver(tiny)
        request = driver.add(
            prompt,
            14,
            beam=BeamParams(4, length_penalty),
            n=4,
            ignore_eos=False,
            stop_token_ids=(3, 50, 51, 52),
        )
        driver.run()
        for index in range(4):
            choice = driver.choices[request][index]
            tokens = choice.tokens + ([choice.stop_token] if choice.stop_token is not None else [])
            theirs = expected.sequences[index, len(prompt) :].tolist()
            assert tokens == theirs[: len(tokens)]
            assert set(theirs[len(tokens) :]) <= {0}
            assert choice.score == pytest.approx(float(expected.sequences_scores[index]), abs=1e-4)


def test_eng_050_prompt_logprobs_twice_are_complete_and_equal(tiny: Any) -> None:
    driver = EngineDriver(tiny)
    sampling = SamplingParams(temperature=0.0, num_prompt_logprobs=2)
    reports = []
    for _ in range(2):
        request = driver.add(_prompt(5), 2, sampling)
        driver.run()
        reports.append(driver.prompts[request].prompt_logprobs)
    assert len(reports[0]) == 4
    assert reports[0] == reports[1]


def test_eng_051_prompt_logprobs_of_a_chunked_prompt_cover_all_positions(tiny: Any) -> None:
    sampling = SamplingParams(temperature=0.0, num_prompt_logprobs=1)
    reports = []
    for budget in (7, 512):
        driver = EngineDriver(tiny, max_batch_tokens=budget)
        request = driver.add(_prompt(50), 1, sampling)
        while not driver.prompts:
            assert not driver.choices[request]
            driver.step()
        driver.run()
        reports.append(driver.prompts[request].prompt_logprobs)
    assert len(reports[0]) == 49
    assert reports[0] == reports[1]


def test_eng_074_one_prompt_twenty_times_under_load_gives_equal_outputs(
    tiny_model: Callable[[str], Any], runner_of: Callable[..., Any]
) -> None:
    runner = runner_of(tiny_model("llama-vectors")[0], blocks=24, host_blocks=32)
    driver = EngineDriver(runner, max_batch_tokens=64, preemption="Swap")
    ids = []
    for number in range(20):
        ids.append(driver.add(_prompt(37), 20, REPORTING))
        driver.add(_prompt(20 + number, number), 25)
        driver.step()
    driver.run()
    outcomes = [driver.choices[request_id][0] for request_id in ids]
    assert all(outcome.tokens == outcomes[0].tokens for outcome in outcomes)
    assert all(outcome.logprobs == outcomes[0].logprobs for outcome in outcomes)


def test_a_seeded_sequence_does_not_depend_on_its_batch_mates(tiny: Any) -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=7)
    found = []
    for mates in (0, 9):
        driver = EngineDriver(tiny)
        request = driver.add(_prompt(20), 25, sampling)
        for mate in range(mates):
            driver.add(_prompt(15 + mate, mate), 25, SamplingParams(temperature=0.8, top_k=20, seed=mate))
        driver.run()
        found.append(driver.tokens(request))
    assert found[0] == found[1]
    assert len(set(found[0])) > 5


def test_samples_of_one_request_differ(tiny: Any) -> None:
    driver = EngineDriver(tiny)
    request = driver.add(_prompt(20), 20, SamplingParams(temperature=1.0, seed=3), n=4)
    driver.run()
    assert len({tuple(driver.tokens(request, index)) for index in range(4)}) == 4
