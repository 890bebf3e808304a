"""The whole GPU runner, its programs under the interpreter or on a GPU, against the CPU's runner: the same tokens."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.gpu_runtimes import make_test_runner
from tests.support.plan_driver import PlanDriver, generate

from millpond_common.contract.engine_config import EngineConfig, KvCacheConfig
from millpond_engine.kernels.gpu import configs
from millpond_engine.records.grammar import TokenMasks
from millpond_engine.records.request import SamplingParams
from millpond_engine.records.step import NewRow, RowStep, StepPlan
from millpond_engine.runner import make_torch_runner

WIDE = bool(os.environ.get("MILLPOND_WIDE_SWEEP"))
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter pays for each program, also for one that leaves at once."""
    monkeypatch.setattr(configs, "PROGRAMS_WANTED", 1)


def make_oracle(path: Any) -> Any:
    cache = KvCacheConfig(block_tokens=16, device_bytes=2 << 20)
    return make_torch_runner(
        EngineConfig(model_name="test", model_path=str(path), device="Cpu", dtype="Float32", kv_cache=cache)
    )


@pytest.fixture(scope="module")
def llama(tiny_model: Callable[[str], Any]) -> tuple[Any, Any]:
    """One runner of each kind over the same weights: plans start from new rows, whatever ran before."""
    path, _ = tiny_model("llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(configs, "PROGRAMS_WANTED", 1)
        return make_test_runner(path)[0], make_oracle(path)


def make_prompts(*lengths: int) -> list[list[int]]:
    generator = random.Random(7)
    return [[generator.randrange(211) for _ in range(length)] for length in lengths]


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["llama", "qwen3"] if WIDE else ["qwen3"])
def test_tokens_equal_the_cpu_runner_chunked_mixed_and_recorded(
    variant: str, tiny_model: Callable[[str], Any]
) -> None:
    path, _ = tiny_model(variant)
    prompts = make_prompts(17, 3, 20)
    runner, runtime = make_test_runner(path)
    recorded = runtime.num_replays
    assert generate(runner, prompts, 3, budget=22) == generate(make_oracle(path), prompts, 3, budget=22)
    assert runtime.num_replays > recorded


def test_swap_fork_and_recompute_leave_the_tokens_alone(tiny_model: Callable[[str], Any]) -> None:
    path, _ = tiny_model("qwen2")
    prompts = make_prompts(17, 3)
    expected = generate(make_oracle(path), prompts, 3)
    driver = PlanDriver(make_test_runner(path)[0], poison=True)
    rows = [driver.add(prompt, 3) for prompt in prompts]
    driver.step()
    driver.swap(rows[0])
    other = driver.fork(rows[0], 3, GREEDY, 1)
    driver.step()
    driver.recompute(rows[1])
    driver.run()
    assert [row.output for row in rows] == expected
    assert other.output == expected[0]


def test_a_step_is_launched_before_the_last_is_read(llama: tuple[Any, Any]) -> None:
    prompt = make_prompts(9)[0]
    runner, oracle = llama
    new = NewRow(0, GREEDY, 0, tuple(prompt), 9, (3,))
    pending = [runner.launch(StepPlan(0, (RowStep(0, 0, 9),), (new,)))]
    pending.extend(runner.launch(StepPlan(1 + i, (RowStep(0, 9 + i, 1),))) for i in range(2))
    tokens = [step.result().rows[0].token for step in pending]
    assert tokens == generate(oracle, [prompt], 3)[0]


def test_reports_and_edits_equal_the_cpu_runner(llama: tuple[Any, Any]) -> None:
    """Greedy under penalties and bans, so that both runners choose the same whatever their random numbers are."""
    sampling = SamplingParams(
        temperature=0.0,
        presence_penalty=0.6,
        frequency_penalty=0.4,
        repetition_penalty=1.3,
        logit_bias=((5, 2.0), (9, -3.0)),
        bad_words=((7,),),
        num_logprobs=3,
        num_prompt_logprobs=2,
    )
    results = []
    for runner in llama:
        driver = PlanDriver(runner)
        rows = [
            driver.add(make_prompts(12)[0], 3, sampling, stop_token_ids=(3,), min_tokens=2),
            driver.add(make_prompts(4)[0], 3),
        ]
        driver.run(budget=10)
        results.append(rows)
    for ours, theirs in zip(*results, strict=True):
        assert ours.output == theirs.output
        for found, expected in zip(ours.results, theirs.results, strict=True):
            assert (found.logprobs is None) == (expected.logprobs is None)
            pairs = list(zip(found.prompt_logprobs, expected.prompt_logprobs, strict=True))
            if found.logprobs is not None and expected.logprobs is not None:
                pairs.append((found.logprobs, expected.logprobs))
            for one, other in pairs:
                assert one.rank == other.rank
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
                assert [token for token, _ in one.top] == [token for token, _ in other.top]
    assert len(results[0][0].results[0].prompt_logprobs) > 0


@pytest.mark.slow
def test_random_choice_depends_on_the_row_alone(llama: tuple[Any, Any]) -> None:
    prompt = make_prompts(6)[0]
    sampling = SamplingParams(temperature=0.9, top_p=0.8, top_k=50, min_p=0.01)
    outputs = []
    for extra in (0, 1):
        driver = PlanDriver(llama[0])
        row = driver.add(prompt, 2, sampling, seed=(1 << 47) + 11)
        for _ in range(extra):
            driver.add(prompt, 2, sampling, seed=5)
        driver.run()
        outputs.append(row.output)
    assert outputs[0] == outputs[1]


def test_beams_report_the_likeliest_tokens(llama: tuple[Any, Any]) -> None:
    prompt = make_prompts(6)[0]
    runner, oracle = llama
    new = NewRow(1, GREEDY, 0, tuple(prompt), 6, (2,))
    step = runner.launch(StepPlan(0, (RowStep(1, 0, 6, num_branches=3),), (new,)))
    branches = step.result().rows[0].branches
    assert len(branches) == 3
    assert branches[0][0] == generate(oracle, [prompt], 1)[0][0]
    assert branches[0][1] > branches[1][1] > branches[2][1]


def test_masks_leave_the_tokens_of_the_cpu_runner(llama: tuple[Any, Any]) -> None:
    """Launched ahead: each step's masks come when the step before has been read, as the engine does it."""
    sampling = SamplingParams(temperature=0.0, repetition_penalty=1.2, num_logprobs=1)
    prompts = make_prompts(9, 5)
    found = []
    for runner in llama:
        generator = random.Random(11)
        news = tuple(
            NewRow(i, sampling, 0, tuple(prompt), len(prompt), (3 + i,), constrained=i == 1)
            for i, prompt in enumerate(prompts)
        )
        results, previous = [], None
        for step in range(3):
            rows = tuple(
                RowStep(i, len(p) - 1 + step if step else 0, 1 if step else len(p))
                for i, p in enumerate(prompts)
            )
            pending = runner.launch(StepPlan(step, rows, () if step else news, constrained=(1,)))
            if previous is not None:
                results.append(previous.result())
            allowed = generator.sample(range(211), 5)
            pending.choose(TokenMasks((1,), sum(1 << token for token in allowed).to_bytes(27, "little"), 27))
            previous = pending
        assert previous is not None
        results.append(previous.result())
        assert {row.token for row in results[-1].rows if row.row == 1} <= set(allowed)
        found.append([[(row.row, row.token) for row in result.rows] for result in results])
    assert found[0] == found[1]


def test_a_row_without_a_choice_fails_alone(llama: tuple[Any, Any]) -> None:
    runner, _ = llama
    nothing = SamplingParams(temperature=0.0, allowed_token_ids=(4,), bad_words=((4,),))
    news = (NewRow(0, nothing, 0, (1, 2), 2, (0,)), NewRow(1, GREEDY, 0, (1, 2), 2, (1,)))
    result = runner.launch(StepPlan(0, (RowStep(0, 0, 2), RowStep(1, 0, 2)), news)).result()
    assert list(result.failed_rows) == [0]
    assert [row.row for row in result.rows] == [1]
