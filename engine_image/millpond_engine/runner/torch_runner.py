"""Executes step plans with torch on one device."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from millpond_engine.engine.runner import RunnerError, RunnerInfo
from millpond_engine.kernels.inputs import PagedAttention
from millpond_engine.model.decoder import Decoder
from millpond_engine.records.step import RowResult, RowStep, StepPlan, StepResult
from millpond_engine.runner.kv_cache import KvCache
from millpond_engine.runner.rows import RowTable
from millpond_engine.runner.sampler import SampledStep, Sampler
from millpond_engine.runner.sampling_table import SamplingTable


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that was executed inside `launch`, as on the CPU."""

    outcome: StepResult

    def result(self) -> StepResult:
        return self.outcome


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

    def launch(self, plan: StepPlan) -> FinishedStep:
        started = time.perf_counter()
        try:
            with torch.inference_mode():
                out = self._execute(plan)
        except (RuntimeError, MemoryError) as error:
            raise RunnerError(f"step {plan.step} with {plan.num_tokens} tokens failed: {error}") from error
        return FinishedStep(StepResult(plan.step, tuple(out.rows), time.perf_counter() - started, out.failed))

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass

    def poison_blocks(self, blocks: tuple[int, ...]) -> None:
        """Fill freed blocks with NaN: a test's way to see a read of memory that was given back."""
        with torch.inference_mode():
            self._cache.poison(blocks)

    def _execute(self, plan: StepPlan) -> SampledStep:
        self._cache.swap_out(plan.swap_out)
        self._cache.swap_in(plan.swap_in)
        self._rows.apply(plan)
        for new in plan.new_rows:
            self._table.add(new)
        self._cache.copy(plan.copies)
        return self._forward(plan.rows) if plan.rows else SampledStep()

    def _forward(self, steps: tuple[RowStep, ...]) -> SampledStep:
        inputs, tokens = self._rows.inputs(steps)
        self._attention.bind(inputs)
        sampled = [index for index, step in enumerate(steps) if step.sample or step.num_branches]
        reported = [index for index, step in enumerate(steps) if step.prompt_logprobs]
        offsets = inputs.query_offsets.long()
        spans = [torch.arange(int(offsets[index]), int(offsets[index + 1])) for index in reported]
        wanted = torch.cat([offsets[1:][sampled] - 1, *spans])
        hidden = self._model.forward(tokens, self._attention, wanted)
        out = SampledStep()
        self._sampler.sample([steps[index] for index in sampled], hidden, out)
        first = len(sampled)
        for index in reported:
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
