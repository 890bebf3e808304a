"""Whole GPU steps on tensors without content: shapes, dtypes, devices, and nothing that waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.support.gpu_launches import Launch, recorded_launches
from tests.support.gpu_runtimes import FakeRuntime, NoWaiting, load_fake, make_config
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from millpond_engine.model.config import ModelConfig
from millpond_engine.model.rope import RopeSettings
from millpond_engine.records.grammar import TokenMasks
from millpond_engine.records.request import SamplingParams
from millpond_engine.records.step import BlockCopy, BlockMove, NewRow, RowStep, StepPlan
from millpond_engine.runner.cuda_load import make_runner, run_largest_step
from millpond_engine.runner.cuda_runner import CudaRunner
from millpond_engine.runner.kv_cache import KvCache
from millpond_engine.runner.memory import PoolSize

GREEDY = SamplingParams(temperature=0.0)
EVERYTHING = SamplingParams(
    temperature=0.7,
    top_p=0.9,
    top_k=20,
    min_p=0.05,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    repetition_penalty=1.2,
    logit_bias=((4, 1.0), (4, 2.0)),
    allowed_token_ids=tuple(range(100)),
    bad_words=((7,), (1, 2, 3)),
    num_logprobs=5,
    num_prompt_logprobs=0,
)


def make_model(family: str) -> ModelConfig:
    return ModelConfig(
        family=family,
        name=family,
        num_layers=2,
        hidden_size=256,
        intermediate_size=512,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        vocabulary_size=1024,
        max_position_tokens=256,
        norm_eps=1e-6,
        rope=RopeSettings(),
        tied_embeddings=True,
        eos_token_ids=(3,),
        checkpoint_dtype="bfloat16",
    )


@pytest.fixture(params=["llama", "qwen2", "qwen3", "llama on 2 ranks", "qwen3 on 4 ranks"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaRunner]:
    monkeypatch.setattr(KvCache, "measure_copy_bandwidth", lambda self: 1e9)
    config, runtime = make_config("model", max_sequences=9), FakeRuntime()
    with FakeTensorMode(), recorded_launches():
        family, _, ranks = request.param.partition(" on ")
        loaded = load_fake(make_model(family), config, size=int(ranks.split()[0]) if ranks else 1)
        run_largest_step(config, loaded, runtime)
        with NoWaiting():
            yield make_runner(config, loaded, runtime, PoolSize(32, "the test"))


def make_row(row: int, sampling: SamplingParams = GREEDY, prompt: int = 5) -> NewRow:
    table = (2 * row, 2 * row + 1)
    return NewRow(row, sampling, row, tuple(range(prompt)), prompt, table, stop_token_ids=(3,), min_tokens=2)


def test_every_kind_of_step_runs_without_waiting(runner: CudaRunner) -> None:
    """Failed rows are right here: tensors without content come back as zeros, and zero is a finite value."""
    news = (make_row(0), make_row(1, EVERYTHING), make_row(2), make_row(3, SamplingParams(temperature=0.5)))
    first = StepPlan(0, (*(RowStep(row, 0, 5) for row in (0, 1, 3)), RowStep(2, 0, 3, sample=False)), news)
    result = runner.launch(first).result()
    assert [row.row for row in result.rows] == [0, 1, 3]
    assert result.rows[1].logprobs is not None
    assert len(result.rows[1].logprobs.top) == 5

    decodes = StepPlan(1, tuple(RowStep(row, 5, 1) for row in (0, 1, 3)))
    mixed = StepPlan(
        2,
        (
            RowStep(0, 6, 1),
            RowStep(1, 6, 1),
            RowStep(2, 3, 2),
            RowStep(4, 0, 20, (20,), prompt_logprobs=True),
        ),
        (make_row(4, EVERYTHING, 20),),
        dropped_rows=(3,),
        replaced_tables=((1, (9, 8)),),
        copies=(BlockCopy(2, 9), BlockCopy(3, 8)),
        swap_out=(BlockMove(6, 0), BlockMove(7, 1)),
        swap_in=(BlockMove(10, 1),),
    )
    beams = StepPlan(3, (RowStep(0, 7, 1, num_branches=3), RowStep(1, 7, 1)), appended_tokens=((0, 8),))
    pending = [runner.launch(plan) for plan in (decodes, mixed, beams)]
    results = [step.result() for step in pending]
    assert [[row.row for row in result.rows] for result in results] == [[0, 1, 3], [0, 1, 2, 4], [0, 1]]
    assert len(results[1].rows[3].prompt_logprobs) == 19
    assert len(results[2].rows[0].branches) == 3


@pytest.mark.parametrize("size", [2, 100])
def test_a_step_under_masks_waits_for_them_and_for_nothing_else(
    runner: CudaRunner, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """The forward pass is launched first; masks travel as bits and are spread out on the device."""
    monkeypatch.setattr(runner._sampler, "_slice", size)
    bound = replace(make_row(1, EVERYTHING), constrained=True)
    news = (make_row(0), bound, replace(make_row(2), constrained=True), make_row(3))
    first = StepPlan(0, tuple(RowStep(row, 0, 5) for row in range(4)), news, constrained=(1, 2))
    decode = StepPlan(1, tuple(RowStep(row, 5, 1) for row in range(4)), constrained=(1, 2))
    alone = StepPlan(2, (RowStep(1, 6, 1), RowStep(2, 6, 1)), constrained=(1, 2))
    gone = StepPlan(3, (RowStep(1, 7, 1),), constrained=(1,))
    masks = TokenMasks((2, 1), bytes(range(256)), 128)
    pending = []
    for plan in (first, decode, alone, gone):
        pending.append(runner.launch(plan))
        pending[-1].choose(masks if plan is not gone else TokenMasks())
    results = [step.result() for step in pending]
    assert [[row.row for row in result.rows] for result in results] == [
        [0, 1, 2, 3],
        [0, 1, 2, 3],
        [1, 2],
        [1],
    ]


def test_a_plan_without_rows_runs(runner: CudaRunner) -> None:
    plan = StepPlan(
        0, (), (make_row(0),), swap_in=(BlockMove(0, 0), BlockMove(1, 1)), copies=(BlockCopy(0, 1),)
    )
    assert runner.launch(plan).result().rows == ()


def test_a_wide_batch_is_cut_into_slices(runner: CudaRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner._sampler, "_slice", 4)
    news = tuple(make_row(row) for row in range(9))
    result = runner.launch(StepPlan(0, tuple(RowStep(row, 0, 5) for row in range(9)), news)).result()
    assert [row.row for row in result.rows] == list(range(9))


def test_the_means_of_this_file_see_what_they_look_for() -> None:
    launches: list[Launch]
    with FakeTensorMode(), recorded_launches() as launches, NoWaiting():
        there, here = torch.ones(3, device="cuda"), torch.ones(3)
        with pytest.raises(DataDependentOutputException):
            there.sum().item()
        with pytest.raises(RuntimeError, match="device"):
            there + here
        with pytest.raises(AssertionError, match="waits"):
            there.cpu()
        with pytest.raises(AssertionError, match="waits"):
            here.to("cuda")
        there.copy_(here, non_blocking=True)
    assert not launches
