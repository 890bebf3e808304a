"""Executes step plans on a GPU without waiting for it: a launched step is read later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from millpond_engine.engine.runner import RunnerError, RunnerInfo
from millpond_engine.kernels.inputs import PagedAttention, StepInputs
from millpond_engine.model.decoder import Decoder
from millpond_engine.records.grammar import TokenMasks
from millpond_engine.records.step import RowStep, StepPlan, StepResult
from millpond_engine.runner.cuda_cache import CudaKvCache
from millpond_engine.runner.cuda_graphs import DecodeGraphs
from millpond_engine.runner.cuda_rows import DeviceRows
from millpond_engine.runner.cuda_runtime import DeviceRuntime, Fetch
from millpond_engine.runner.cuda_sampler import CudaSampler, PendingPrompt, PendingRows
from millpond_engine.runner.forward import Forward
from millpond_engine.runner.masks import NO_MASKS, RowMasks
from millpond_engine.runner.sampler import SampledStep


@dataclass(frozen=True, slots=True)
class CudaStep:
    """A step on the device, its results on their way to the host."""

    step: int
    parts: Sequence[PendingRows | PendingPrompt]
    fetch: Fetch

    def result(self) -> StepResult:
        fetched = self.fetch.wait()
        out, arrays = SampledStep(), iter(fetched.arrays)
        for part in self.parts:
            part.finish(arrays, out)
        return StepResult(self.step, tuple(out.rows), fetched.seconds, out.failed)

    def choose(self, masks: TokenMasks) -> None:
        raise AssertionError(f"step {self.step} has chosen: its plan names no constrained rows")


class OpenCudaStep:
    """A step whose forward pass runs on the device while the masks of its choice are made.

    Nothing else may be launched between its pass and its choice: a graph's output is overwritten by the next one.
    """

    def __init__(self, runner: CudaRunner, plan: StepPlan, forward: Forward, since: Any) -> None:
        self._runner = runner
        self._plan = plan
        self._forward = forward
        self._since = since
        self._chosen: CudaStep | None = None

    def choose(self, masks: TokenMasks) -> None:
        self._chosen = self._runner.finish(self._plan, self._forward, RowMasks(masks), self._since)

    def result(self) -> StepResult:
        assert self._chosen is not None, "a step with constrained rows chooses before it is read"
        return self._chosen.result()


class CudaRunner:
    """One model on one GPU; not thread-safe.

    Out of memory ends the step alone. Any other error of the device leaves its context unusable: it is not caught
    here and ends the process.
    """

    def __init__(
        self,
        *,
        info: RunnerInfo,
        model: Decoder,
        attention: PagedAttention,
        cache: CudaKvCache,
        rows: DeviceRows,
        runtime: DeviceRuntime,
        max_sequences: int,
    ) -> None:
        self._info = info
        self._model = model
        self._attention = attention
        self._cache = cache
        self._rows = rows
        self._runtime = runtime
        self._sampler = CudaSampler(rows, model, runtime)
        self._graphs = DecodeGraphs(runtime, rows, self._run_model, max_sequences=max_sequences)
        with torch.inference_mode():
            self._graphs.record()

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def launch(self, plan: StepPlan) -> CudaStep | OpenCudaStep:
        since = self._runtime.mark()
        with _failing_alone(plan):
            forward = self._execute(plan)
        if plan.constrained:
            return OpenCudaStep(self, plan, forward, since)
        return self.finish(plan, forward, NO_MASKS, since)

    def finish(self, plan: StepPlan, forward: Forward, masks: RowMasks, since: Any) -> CudaStep:
        """Launch the choice of a step's tokens and their way to the host.

        Raises:
            RunnerError: the device has no memory left for it.
        """
        with _failing_alone(plan):
            parts = self._sample(forward, masks)
            tensors = [tensor for part in parts for tensor in part.tensors()]
            return CudaStep(plan.step, parts, self._runtime.fetch(tensors, since))

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass

    def poison_blocks(self, blocks: tuple[int, ...]) -> None:
        """Fill freed blocks with NaN: a test's way to see a read of memory that was given back."""
        with torch.inference_mode():
            self._cache.poison(blocks)

    def _execute(self, plan: StepPlan) -> Forward:
        self._cache.move(plan)
        self._rows.apply(plan)
        for new in plan.new_rows:
            self._sampler.add(new)
        self._cache.copy(plan.copies)
        return self._run_rows(plan.rows) if plan.rows else Forward()

    def _run_rows(self, steps: tuple[RowStep, ...]) -> Forward:
        sampled = [index for index, step in enumerate(steps) if step.sample or step.num_branches]
        reported = [index for index, step in enumerate(steps) if step.prompt_logprobs]
        return Forward(steps, self._hidden(steps, sampled, reported), tuple(sampled), tuple(reported))

    def _sample(self, forward: Forward, masks: RowMasks) -> list[PendingRows | PendingPrompt]:
        parts: list[PendingRows | PendingPrompt] = []
        steps, hidden, sampled = forward.steps, forward.hidden, forward.sampled
        if hidden is None:
            return parts
        if sampled:
            chosen = [steps[index] for index in sampled]
            parts.extend(self._sampler.sample(chosen, hidden[: len(sampled)], masks))
        first = len(sampled)
        for index in forward.reported:
            last = first + steps[index].num_tokens
            parts.append(self._sampler.prompt_logprobs(steps[index], hidden[first:last]))
            first = last
        return parts

    def _hidden(self, steps: tuple[RowStep, ...], sampled: list[int], reported: list[int]) -> torch.Tensor:
        """Hidden states behind the last token of sampled rows, then of all tokens of reported ones."""
        rows, starts, counts = (
            np.fromiter((getattr(step, name) for step in steps), np.int32, len(steps))
            for name in ("row", "start", "num_tokens")
        )
        if len(sampled) == counts.sum() and not reported and self._graphs.fits(len(steps)):
            return self._graphs.run(rows, starts)
        offsets = np.concatenate((np.zeros(1, np.int64), counts.cumsum(dtype=np.int64)))
        spans = [np.arange(offsets[index], offsets[index + 1]) for index in reported]
        wanted = self._runtime.upload(np.concatenate((offsets[1:][sampled] - 1, *spans)))
        inputs, ids = self._rows.inputs(rows, starts, counts)
        return self._run_model(inputs, ids, wanted)

    def _run_model(
        self, inputs: StepInputs, ids: torch.Tensor, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        self._attention.bind(inputs)
        return self._model.forward(ids, self._attention, wanted)


@contextmanager
def _failing_alone(plan: StepPlan) -> Iterator[None]:
    """Turn the device's lack of memory into the loss of this step."""
    try:
        with torch.inference_mode():
            yield
    except torch.OutOfMemoryError as error:
        raise RunnerError(
            f"step {plan.step} with {plan.num_tokens} tokens needs more memory than the device has left; "
            f"lower kvCache.devicePercent or scheduling.maxBatchTokens: {error}"
        ) from error
