"""One model on several ranks: the same tokens as on one, and the loss of a rank is never silent."""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.plan_driver import PlanDriver, generate
from tests.unit.millpond_engine.runner.conftest import make_runner

from millpond_common.contract.engine_config import EngineConfig
from millpond_engine.model.errors import ModelFormatError
from millpond_engine.records.request import SamplingParams
from millpond_engine.runner import make_torch_runner
from millpond_engine.runner.collectives import TorchCollectives
from millpond_engine.runner.ranks import RankLostError, RankProcesses

SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.1, num_logprobs=3)


@contextmanager
def ranks_of(path: Path, size: int, **options: Any) -> Iterator[Any]:
    runner = make_runner(path, tensor_parallel_size=size, **options)
    try:
        yield runner
    finally:
        runner.close()


def _run(runner: Any) -> list[Any]:
    """Greedy and sampled rows with log-probabilities, chunked, one swapped, one recomputed."""
    rng = random.Random(5)
    driver = PlanDriver(runner, poison=True)
    prompts = [[rng.randrange(211) for _ in range(length)] for length in (1, 9, 40, 33)]
    greedy = SamplingParams(temperature=0.0, num_logprobs=2, num_prompt_logprobs=1)
    rows = [driver.add(prompt, 12, greedy) for prompt in prompts]
    rows.append(driver.add(prompts[2], 12, SAMPLED, seed=77))
    for _ in range(7):
        driver.step(budget=16)
    driver.swap(rows[0])
    driver.recompute(rows[1])
    driver.run(budget=16)
    reports = [[r.logprobs for r in row.results if r.logprobs] for row in rows]
    prompt_reports = [[e.logprob for r in row.results for e in r.prompt_logprobs] for row in rows]
    return [[row.output for row in rows], reports, prompt_reports]


@pytest.mark.parametrize(
    ("variant", "size"),
    [
        ("llama-groups", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("qwen2", 2), ("qwen3", 3))),
    ],
)
def test_several_ranks_give_what_one_gives(variant: str, size: int, tiny_model: Callable[[str], Any]) -> None:
    path = tiny_model(variant)[0]
    alone = make_runner(path, blocks=40, host_blocks=5)
    tokens, reports, prompt_reports = _run(alone)
    with ranks_of(path, size, blocks=40, host_blocks=5) as runner:
        found, found_reports, found_prompts = _run(runner)
        info = runner.info
        pids = runner.ranks.pids
    assert found == tokens
    for ours, theirs in zip(found_reports, reports, strict=True):
        assert [r.logprob for r in ours] == pytest.approx([r.logprob for r in theirs], abs=1e-4)
    for ours, theirs in zip(found_prompts, prompt_reports, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert not any(_lives(pid) for pid in pids)
    if (
        variant == "llama-groups"
    ):  # 2 + 1 key-value heads: the ranks' blocks together are as large as one rank's
        assert (info.num_blocks, info.num_host_blocks) == (40, 5)
        assert info.bytes_per_block == alone.info.bytes_per_block


@pytest.mark.model
def test_smollm2_on_two_ranks_equals_one(smollm2: Any, smollm2_gguf: Path) -> None:
    rng = random.Random(8)
    prompts = [[rng.randrange(17, 49000) for _ in range(length)] for length in (3, 17, 64)]
    expected = generate(smollm2, prompts, 8)
    with ranks_of(smollm2_gguf, 2) as runner:
        assert generate(runner, prompts, 8, 32) == expected


def test_a_killed_rank_is_named_at_rest_and_in_a_step(tiny_model: Callable[[str], Any]) -> None:
    with ranks_of(tiny_model("qwen2")[0], 2) as runner:
        runner.check()
        os.kill(runner.ranks.pids[0], signal.SIGKILL)
        with pytest.raises(RankLostError, match="rank 1 was ended by signal 9"):
            _wait_until_lost(runner)
        with pytest.raises(RankLostError, match="rank 1 was ended by signal 9"):
            generate(runner, [[1, 2, 3]], 4)


def test_a_rank_that_hangs_ends_the_step_in_bounded_time(
    tiny_model: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded = functools.partial(TorchCollectives, seconds=4.0)
    monkeypatch.setattr("millpond_engine.runner.parallel_runner.TorchCollectives", bounded)
    with ranks_of(tiny_model("qwen2")[0], 2) as runner:
        os.kill(runner.ranks.pids[0], signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(RankLostError, match="step"):
            generate(runner, [[1, 2, 3]], 4)
        assert time.monotonic() - started < 20
        pids = runner.ranks.pids
    assert not any(_lives(pid) for pid in pids)


def test_an_engine_that_does_not_end_by_itself_is_ended(tiny_model: Callable[[str], Any]) -> None:
    codes: list[int] = []
    config = EngineConfig(
        model_name="t", model_path=str(tiny_model("qwen2")[0]), device="Cpu", tensor_parallel_size=2
    )
    ranks = RankProcesses(config, num_threads=1, grace_seconds=0.2, give_up=codes.append)
    os.kill(ranks.pids[0], signal.SIGKILL)
    deadline = time.monotonic() + 20
    while not codes and time.monotonic() < deadline:
        time.sleep(0.02)
    ranks.close()
    assert codes == [1]


def test_no_rank_outlives_a_failed_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def popen(*arguments: Any, **options: Any) -> Any:
        started.append(real(*arguments, **options))
        return started[-1]

    monkeypatch.setattr("millpond_engine.runner.ranks.subprocess.Popen", popen)
    config = EngineConfig(model_name="t", model_path=str(tmp_path), device="Cpu", tensor_parallel_size=2)
    with pytest.raises((ModelFormatError, RankLostError), match="model_path"):
        make_torch_runner(config)
    assert len(started) == 1
    assert started[0].poll() is not None


def _wait_until_lost(runner: Any) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        runner.check()
        time.sleep(0.02)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
