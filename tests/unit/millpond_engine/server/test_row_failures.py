"""A row that fails alone: whose fault it was, and what becomes of the other choices of its request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.support.engine_server import Setup, run_engine

from millpond_common.contract.engine_config import EngineConfig
from millpond_engine.commands.fake import make_fake_info, make_script
from millpond_engine.fake.runner import FakeOptions, FakePendingStep, FakeRunner
from millpond_engine.records.step import RowFailure, StepPlan
from millpond_engine.text.bytes_tokenizer import ByteTokenizer

STEPS_BEFORE = 3


class FailingRows(FakeRunner):
    """From its fourth step on, the last row of a step that computes as many rows as asked for fails."""

    failure = RowFailure.NO_CHOICE
    num_rows_wanted = 1

    def launch(self, plan: StepPlan) -> FakePendingStep:
        pending = super().launch(plan)
        if len(plan.rows) < self.num_rows_wanted or self._num_steps <= STEPS_BEFORE:
            return pending
        row = plan.rows[-1].row
        rows = tuple(result for result in pending.outcome.rows if result.row != row)
        outcome = replace(pending.outcome, rows=rows, failed_rows={row: self.failure})
        return replace(pending, outcome=outcome)


@pytest.fixture
def make_failing() -> Callable[..., Any]:
    def start(failure: RowFailure, num_rows: int) -> Any:
        def make_runner(config: EngineConfig, progress: Callable[[int, int], None]) -> FakeRunner:
            progress(1, 1)
            tokenizer = ByteTokenizer()
            info = make_fake_info(config, tokenizer, num_blocks=256, num_host_blocks=0)
            runner = FailingRows(
                info, make_script(tokenizer, output_tokens=64, fixed_text=None), FakeOptions()
            )
            runner.failure, runner.num_rows_wanted = failure, num_rows
            return runner

        return run_engine(Setup(make_runner=make_runner))

    return start


@pytest.mark.parametrize(
    ("failure", "status", "code", "outcome"),
    [
        (RowFailure.NO_CHOICE, 400, "invalid_value", "refused"),
        (RowFailure.NOT_NUMBERS, 500, "engine_error", "error"),
    ],
)
async def test_a_request_that_excludes_every_token_is_the_callers_fault(
    make_failing: Callable[..., Any], failure: RowFailure, status: int, code: str, outcome: str
) -> None:
    async with make_failing(failure, 1) as engine:
        got, answer = await engine.post("/v1/completions", {"prompt": "hi", "max_tokens": 9})
        assert (got, answer["error"]["code"]) == (status, code)
        assert answer["error"]["message"] == failure.value
        stream = await engine.stream("/v1/completions", {"prompt": "hi", "max_tokens": 9})
        await engine.settle()
        _, metrics = await engine.get("/metrics")
    assert stream.status in (status, 200)
    assert not stream.done
    assert f'"code":"{code}"' in stream.raw.decode().replace(" ", "")
    assert f'outcome="{outcome}"' in metrics


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failed_choice_never_looks_finished(make_failing: Callable[..., Any], stream: bool) -> None:
    async with make_failing(RowFailure.NOT_NUMBERS, 2) as engine:
        body = {"prompt": "hi", "max_tokens": 30, "n": 2, "temperature": 1.0}
        if stream:
            got = await engine.stream("/v1/completions", body)
            assert not got.done
            assert "event: error" in got.raw.decode()
            assert got.finish(0) is got.finish(1) is None
        else:
            status, answer = await engine.post("/v1/completions", body)
            assert (status, answer["error"]["code"]) == (500, "engine_error")
        await engine.settle()
