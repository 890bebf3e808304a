"""Choosing the next tokens of a step on the device; the host reads them when they have arrived."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from millpond_engine.kernels.gpu.sampling import MIN_TEMPERATURE, DrawInputs, choose
from millpond_engine.model.decoder import Decoder
from millpond_engine.records.step import NewRow, RowResult, RowStep, TokenLogprobs
from millpond_engine.runner.cuda_edits import EditedRow, LogitEditor
from millpond_engine.runner.cuda_reports import ReportTensors, report_tokens
from millpond_engine.runner.cuda_rows import DeviceRows
from millpond_engine.runner.cuda_runtime import Array, DeviceRuntime, upload_columns
from millpond_engine.runner.masks import NO_MASKS, RowMasks
from millpond_engine.runner.sampler import SLICE_BYTES, SampledStep, explain_row
from millpond_engine.runner.sampling_table import SamplingTable


@dataclass(frozen=True, slots=True)
class PendingRows:
    """Some rows of a launched step: tensors that are on their way to the host, and how to read them."""

    steps: list[RowStep]
    edited: Array
    """Which of the steps change the model's scores before the choice."""
    best: torch.Tensor
    tokens: torch.Tensor
    reported: list[int]
    """Which of the steps have a report."""
    reports: ReportTensors | None
    branches: tuple[torch.Tensor, torch.Tensor] | None
    """Beam search: log-probabilities and ids of the most likely tokens of every step here."""

    def tensors(self) -> list[torch.Tensor]:
        """What has to come to the host, in the order `finish` reads it."""
        reports = [] if self.reports is None else self.reports.tensors()
        return [self.best, self.tokens, *reports, *(self.branches or ())]

    def finish(self, arrays: Iterator[Array], out: SampledStep) -> None:
        """Turn what arrived into results."""
        best, tokens = next(arrays), next(arrays).tolist()
        found: dict[int, TokenLogprobs] = {}
        if self.reports is not None:
            found = dict(zip(self.reported, self.reports.finish(arrays), strict=True))
        branches = [next(arrays).tolist() for _ in self.branches or ()]
        for index, step in enumerate(self.steps):
            if not np.isfinite(best[index]):
                out.failed[step.row] = explain_row(float(best[index]), bool(self.edited[index]))
            elif step.num_branches:
                values, ids = (part[index][: step.num_branches] for part in branches)
                out.rows.append(RowResult(step.row, branches=tuple(zip(ids, values, strict=True))))
            else:
                out.rows.append(RowResult(step.row, tokens[index], found.get(index)))


@dataclass(frozen=True, slots=True)
class PendingPrompt:
    """Log-probabilities of a row's prompt tokens on their way to the host."""

    row: int
    parts: list[ReportTensors]

    def tensors(self) -> list[torch.Tensor]:
        """What has to come to the host, in the order `finish` reads it."""
        return [tensor for part in self.parts for tensor in part.tensors()]

    def finish(self, arrays: Iterator[Array], out: SampledStep) -> None:
        """Add them to the row's result, or make one."""
        found = tuple(entry for part in self.parts for entry in part.finish(arrays))
        for index, result in enumerate(out.rows):
            if result.row == self.row:
                out.rows[index] = RowResult(self.row, result.token, result.logprobs, result.branches, found)
                return
        out.rows.append(RowResult(self.row, prompt_logprobs=found))


class CudaSampler:
    """Turns hidden states into tokens, in slices of the vocabulary product; no call waits for the device."""

    def __init__(self, rows: DeviceRows, model: Decoder, runtime: DeviceRuntime) -> None:
        self._rows = rows
        self._model = model
        self._runtime = runtime
        self._table = SamplingTable()
        self._editor = LogitEditor(rows, runtime)
        self._slice = max(1, SLICE_BYTES // (4 * model.config.vocabulary_size))

    def add(self, new: NewRow) -> None:
        """Keep a row's parameters."""
        self._table.add(new)

    def sample(
        self, steps: Sequence[RowStep], hidden: torch.Tensor, masks: RowMasks = NO_MASKS
    ) -> list[PendingRows]:
        """Choose for each step's row, from hidden states in the same order, and put the tokens into their rows."""
        parts = range(0, len(steps), self._slice)
        return [
            self._sample_slice(
                list(steps[first : first + self._slice]),
                self._model.scores(hidden[first : first + self._slice]),
                masks,
            )
            for first in parts
        ]

    def prompt_logprobs(self, step: RowStep, hidden: torch.Tensor) -> PendingPrompt:
        """Report the prompt tokens that follow those computed in this step; `hidden` is `[num_tokens, hidden]`."""
        info = self._rows.info(step.row)
        last = min(step.start + step.num_tokens + 1, info.prompt_tokens)
        following = self._rows.tokens[step.row, step.start + 1 : last].long()
        count = info.sampling.num_prompt_logprobs or 0
        parts = []
        for first in range(0, following.shape[0], self._slice):
            tokens = following[first : first + self._slice]
            logits = self._model.scores(hidden[first : first + tokens.shape[0]])
            parts.append(report_tokens(logits, tokens, [count] * tokens.shape[0]))
        return PendingPrompt(step.row, parts)

    def _sample_slice(self, steps: list[RowStep], logits: torch.Tensor, masks: RowMasks) -> PendingRows:
        rows = np.fromiter((step.row for step in steps), np.int64, len(steps))
        positions = np.fromiter((step.start + step.num_tokens for step in steps), np.int64, len(steps))
        edited = self._edit(logits, rows, positions, masks)
        lines, places, seeds, top_k = upload_columns(
            self._runtime, [rows, positions, self._table.seeds[rows].view(np.int64), self._table.top_k[rows]]
        )
        best, tokens = choose(edited, self._draw(rows, seeds, places, top_k))
        self._rows.store_tokens(lines, places, tokens)
        self._rows.note_lengths([step for step in steps if not step.num_branches])
        counts = [self._rows.info(step.row).sampling.num_logprobs for step in steps]
        reported = [index for index, count in enumerate(counts) if count is not None]
        return PendingRows(
            steps,
            self._table.edited[rows],
            best,
            tokens,
            reported,
            self._report(logits, tokens, reported, counts),
            _find_branches(edited, max(step.num_branches for step in steps)),
        )

    def _edit(self, raw: torch.Tensor, rows: Array, positions: Array, masks: RowMasks) -> torch.Tensor:
        wanted = self._table.edited[rows].nonzero()[0].tolist()
        if not wanted:
            return raw
        logits = raw.clone()
        edited = [EditedRow(i, self._rows.info(int(rows[i])), int(positions[i])) for i in wanted]
        self._editor.edit(logits, edited, masks)
        return logits

    def _draw(
        self, rows: Array, seeds: torch.Tensor, positions: torch.Tensor, top_k: torch.Tensor
    ) -> DrawInputs | None:
        """Random choice for the rows, None when all are greedy; truncation only where some row has any."""
        table = self._table
        temperature, top_p, min_p = (table.column(name, rows) for name in ("temperature", "top_p", "min_p"))
        random = (temperature > 0) & (table.top_k[rows] != 1)
        if not random.any():
            return None
        sharpness = np.where(random, 1.0 / np.maximum(temperature, MIN_TEMPERATURE), 0.0).astype(np.float32)
        sharp, mass, share = upload_columns(self._runtime, [sharpness, top_p, min_p])
        truncated = (table.top_k[rows] > 0) | (top_p < 1.0) | (min_p > 0.0)
        if not (random & truncated).any():
            return DrawInputs(sharp, seeds, positions)
        return DrawInputs(sharp, seeds, positions, top_k, mass, share)

    def _report(
        self, raw: torch.Tensor, tokens: torch.Tensor, reported: list[int], counts: list[int | None]
    ) -> ReportTensors | None:
        if not reported:
            return None
        wanted = [counts[index] or 0 for index in reported]
        if len(reported) == raw.shape[0]:
            return report_tokens(raw, tokens, wanted)
        lines = self._runtime.upload(np.array(reported, np.int64))
        return report_tokens(raw.index_select(0, lines), tokens.index_select(0, lines), wanted)


def _find_branches(logits: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not most:
        return None
    values, ids = logits.log_softmax(-1).topk(min(most, logits.shape[-1]))
    return values, ids
