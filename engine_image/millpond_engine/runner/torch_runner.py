"""Executes step plans with torch on one device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from millpond_engine.engine.runner import RunnerError, RunnerInfo
from millpond_engine.kernels.inputs import PagedAttention
from millpond_engine.model.decoder import Decoder
from millpond_engine.records.grammar import TokenMasks
from millpond_engine.records.step import RowResult, RowStep, StepPlan, StepResult
from millpond_engine.runner.forward import Forward
from millpond_engine.runner.kv_cache import KvCache
from millpond_engine.runner.masks import NO_MASKS, RowMasks
from millpond_engine.runner.rows import RowTable
from millpond_engine.runner.sampler import SampledStep, Sampler
from millpond_engine.runner.sampling_table import SamplingTable


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that was executed inside `launch`, as on the CPU."""

    outcome: StepResult

    def choose(self, masks: TokenMasks) -> None:
        raise AssertionError(f"step {self.outcome.step} has chosen: its plan names no constrained rows")

    def result(self) -> StepResult:
        return self.outcome


class OpenStep:
    """A step whose forward pass is done and whose tokens wait for their masks."""

    def __init__(self, runner: TorchRunner, plan: StepPlan, forward: Forward, seconds: float) -> None:
        self._runner = runner
        self._plan = plan
        self._forward = forward
        self._seconds = seconds
        self._outcome: StepResult | None = None

    def choose(self, masks: TokenMasks) -> None:
        self._outcome = self._runner.finish(self._plan, self._forward, RowMasks(masks), self._seconds)

    def result(self) -> StepResult:
        assert self._outcome is not None, "a step with constrained rows chooses before it is read"
        return self._outcome


class TorchRunner:
    """One model on one device; not thread-safe."""

    def __init__(
        self, *, info: RunnerInfo, model: Decoder, attention: PagedAttention, cache: KvCache, rows: RowTable
    ) -> None:
        self._info = info
        self._model = model
        self._attention = attention
        self._cache = cache
        self._rows = rows
        self._table = SamplingTable()
        self._sampler = Sampler(rows, self._table, model)

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def launch(self, plan: StepPlan) -> FinishedStep | OpenStep:
        started = time.perf_counter()
        with _failing_alone(plan):
            forward = self._execute(plan)
        seconds = time.perf_counter() - started
        if plan.constrained:
            return OpenStep(self, plan, forward, seconds)
        return FinishedStep(self.finish(plan, forward, NO_MASKS, seconds))

    def finish(self, plan: StepPlan, forward: Forward, masks: RowMasks, seconds: float) -> StepResult:
        """Choose the tokens of a step; `seconds` is what its forward pass took.

        Raises:
            RunnerError: the step failed and its rows are lost.
        """
        started = time.perf_counter()
        with _failing_alone(plan):
            out = self._sample(forward, masks)
        seconds += time.perf_counter() - started
        return StepResult(plan.step, tuple(out.rows), seconds, out.failed)

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass

    def poison_blocks(self, blocks: tuple[int, ...]) -> None:
        """Fill freed blocks with NaN: a test's way to see a read of memory that was given back."""
        with torch.inference_mode():
            self._cache.poison(blocks)

    def _execute(self, plan: StepPlan) -> Forward:
        self._cache.swap_out(plan.swap_out)
        self._cache.swap_in(plan.swap_in)
        self._rows.apply(plan)
        for new in plan.new_rows:
            self._table.add(new)
        self._cache.copy(plan.copies)
        return self._run_model(plan.rows) if plan.rows else Forward()

    def _run_model(self, steps: tuple[RowStep, ...]) -> Forward:
        inputs, tokens = self._rows.inputs(steps)
        self._attention.bind(inputs)
        sampled = [index for index, step in enumerate(steps) if step.sample or step.num_branches]
        reported = [index for index, step in enumerate(steps) if step.prompt_logprobs]
        offsets = inputs.query_offsets.long()
        spans = [torch.arange(int(offsets[index]), int(offsets[index + 1])) for index in reported]
        wanted = torch.cat([offsets[1:][sampled] - 1, *spans])
        hidden = self._model.forward(tokens, self._attention, wanted)
        return Forward(steps, hidden, tuple(sampled), tuple(reported))

    def _sample(self, forward: Forward, masks: RowMasks) -> SampledStep:
        out, steps, hidden = SampledStep(), forward.steps, forward.hidden
        if hidden is None:
            return out
        self._sampler.sample([steps[index] for index in forward.sampled], hidden, out, masks)
        first = len(forward.sampled)
        for index in forward.reported:
            last = first + steps[index].num_tokens
            self._add_prompt_logprobs(out, steps[index], hidden[first:last])
            first = last
        return out

    def _add_prompt_logprobs(self, out: SampledStep, step: RowStep, hidden: torch.Tensor) -> None:
        found = self._sampler.prompt_logprobs(step, hidden)
        for index, result in enumerate(out.rows):
            if result.row == step.row:
                out.rows[index] = RowResult(step.row, result.token, result.logprobs, result.branches, found)
                return
        out.rows.append(RowResult(step.row, prompt_logprobs=found))


@contextmanager
def _failing_alone(plan: StepPlan) -> Iterator[None]:
    """Turn what torch raises into the loss of this step."""
    try:
        with torch.inference_mode():
            yield
    except (RuntimeError, MemoryError) as error:
        raise RunnerError(f"step {plan.step} with {plan.num_tokens} tokens failed: {error}") from error
