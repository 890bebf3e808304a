"""Executes step plans with torch on one device."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from millpond_engine.core.step import RowResult, RowStep, StepPlan, StepResult
from millpond_engine.engine.runner import RunnerError, RunnerInfo
from millpond_engine.kernels.inputs import PagedAttention
from millpond_engine.model.decoder import Decoder
from millpond_engine.runner.kv_cache import KvCache
from millpond_engine.runner.rows import RowTable


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

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def launch(self, plan: StepPlan) -> FinishedStep:
        started = time.perf_counter()
        try:
            with torch.inference_mode():
                results = self._execute(plan)
        except (RuntimeError, MemoryError) as error:
            raise RunnerError(f"step {plan.step} with {plan.num_tokens} tokens failed: {error}") from error
        return FinishedStep(StepResult(plan.step, results, time.perf_counter() - started))

    def close(self) -> None:
        pass

    def _execute(self, plan: StepPlan) -> tuple[RowResult, ...]:
        self._cache.swap_out(plan.swap_out)
        self._cache.swap_in(plan.swap_in)
        self._rows.apply(plan)
        self._cache.copy(plan.copies)
        return self._forward(plan.rows) if plan.rows else ()

    def _forward(self, steps: tuple[RowStep, ...]) -> tuple[RowResult, ...]:
        inputs, tokens = self._rows.inputs(steps)
        self._attention.bind(inputs)
        sampled = [index for index, step in enumerate(steps) if step.sample]
        wanted = (inputs.query_offsets[1:].long() - 1)[sampled]
        hidden = self._model.forward(tokens, self._attention, wanted)
        if not sampled:
            return ()
        chosen = self._model.logits(hidden).argmax(-1).numpy()
        ends = np.fromiter((steps[i].start + steps[i].num_tokens for i in sampled), np.int64, len(sampled))
        self._rows.append_tokens(
            np.fromiter((steps[i].row for i in sampled), np.int64, len(sampled)), ends, chosen
        )
        return tuple(
            RowResult(steps[i].row, token) for i, token in zip(sampled, chosen.tolist(), strict=True)
        )
