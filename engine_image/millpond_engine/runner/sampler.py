"""Choosing the next tokens of a step: one argmax when every row is simple, otherwise edits, draws and reports."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from millpond_engine.model.decoder import Decoder
from millpond_engine.records.step import NewRow, RowFailure, RowResult, RowStep, TokenLogprobs
from millpond_engine.runner.draw import DrawParams, draw
from millpond_engine.runner.edits import edit_logits
from millpond_engine.runner.logprobs import branches, token_logprobs
from millpond_engine.runner.masks import NO_MASKS, RowMasks
from millpond_engine.runner.rows import RowTable
from millpond_engine.runner.sampling_table import SamplingTable, draw_uniforms, edits_logits

SLICE_BYTES = 64 << 20
"""Most bytes of float32 logits that exist at once."""


@dataclass(slots=True)
class SampledStep:
    """What the rows of a step got."""

    rows: list[RowResult] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)


class Sampler:
    """Turns hidden states into tokens, in slices of the vocabulary product."""

    def __init__(self, rows: RowTable, table: SamplingTable, model: Decoder) -> None:
        self._rows = rows
        self._table = table
        self._model = model
        self._slice = max(1, SLICE_BYTES // (4 * model.config.vocabulary_size))

    def sample(
        self, steps: list[RowStep], hidden: torch.Tensor, out: SampledStep, masks: RowMasks = NO_MASKS
    ) -> None:
        """Choose for each step's row, from hidden states in the same order, and note the tokens in the row table."""
        for first in range(0, len(steps), self._slice):
            part = steps[first : first + self._slice]
            self._sample_slice(part, self._model.scores(hidden[first : first + self._slice]), out, masks)

    def prompt_logprobs(self, step: RowStep, hidden: torch.Tensor) -> tuple[TokenLogprobs, ...]:
        """Report the prompt tokens that follow those computed in this step; `hidden` is `[num_tokens, hidden]`."""
        info = self._rows.info(step.row)
        last = min(step.start + step.num_tokens + 1, info.prompt_tokens)
        following = (
            torch.from_numpy(self._rows.tokens[step.row, step.start + 1 : last]).long().to(hidden.device)
        )
        count = info.sampling.num_prompt_logprobs or 0
        found: list[TokenLogprobs] = []
        for first in range(0, following.shape[0], self._slice):
            tokens = following[first : first + self._slice]
            logits = self._model.scores(hidden[first : first + tokens.shape[0]])
            found.extend(token_logprobs(logits, tokens, [count] * tokens.shape[0]))
        return tuple(found)

    def _sample_slice(
        self, steps: list[RowStep], logits: torch.Tensor, out: SampledStep, masks: RowMasks
    ) -> None:
        rows = np.fromiter((step.row for step in steps), np.int64, len(steps))
        positions = np.fromiter((step.start + step.num_tokens for step in steps), np.int64, len(steps))
        if self._table.simple[rows].all() and not any(step.num_branches for step in steps):
            best, chosen = self._model.ops.argmax(logits)
            reports: list[TokenLogprobs | None] = [None] * len(steps)
        else:
            edited = self._edit(logits, rows, positions, masks)
            best, chosen = edited.amax(-1), draw(edited, self._params(rows, positions, edited.device))
            self._report_branches(steps, edited, out)
            reports = self._report(logits, rows, chosen)
        bad = (~torch.isfinite(best)).nonzero().squeeze(1).tolist()
        tokens = chosen.cpu().numpy()
        kept = [i for i, step in enumerate(steps) if not step.num_branches and i not in bad]
        if len(kept) < len(steps):
            out.failed.update(
                {steps[i].row: explain_row(float(best[i]), self._table.edited[rows[i]]) for i in bad}
            )
        self._rows.append_tokens(rows[kept], positions[kept], tokens[kept])
        out.rows.extend(
            RowResult(steps[i].row, token, reports[i])
            for i, token in zip(kept, tokens[kept].tolist(), strict=True)
        )

    def _edit(
        self, raw: torch.Tensor, rows: np.ndarray, positions: np.ndarray, masks: RowMasks
    ) -> torch.Tensor:
        """Scores to choose by; `raw` itself is changed where nobody will be told about it."""
        wanted = self._table.edited[rows].nonzero()[0].tolist()
        if not wanted:
            return raw
        reports = any(self._rows.info(row).sampling.num_logprobs is not None for row in rows.tolist())
        edited = raw.clone() if reports else raw
        masked = masks.find(rows)
        if masked:
            banned = torch.from_numpy(masks.list_banned(rows, raw.shape[1]))
            edited.masked_fill_(banned.to(raw.device), -math.inf)
        for index in wanted:
            info: NewRow = self._rows.info(int(rows[index]))
            if info.min_tokens or edits_logits(info.sampling):
                edit_logits(edited[index], info, self._rows.tokens[rows[index], : positions[index]])
        return edited

    def _params(self, rows: np.ndarray, positions: np.ndarray, device: torch.device) -> DrawParams:
        table = self._table
        values = [
            torch.from_numpy(table.column(name, rows)).to(device)
            for name in ("temperature", "top_p", "min_p")
        ]
        uniform = torch.from_numpy(draw_uniforms(table.seeds[rows], positions)).to(device)
        top_k = torch.from_numpy(table.top_k[rows]).to(device)
        return DrawParams(
            temperature=values[0], top_k=top_k, top_p=values[1], min_p=values[2], uniform=uniform
        )

    def _report_branches(self, steps: list[RowStep], edited: torch.Tensor, out: SampledStep) -> None:
        for index, step in enumerate(steps):
            if step.num_branches and bool(torch.isfinite(edited[index].amax())):
                out.rows.append(RowResult(step.row, branches=branches(edited[index], step.num_branches)))

    def _report(
        self, raw: torch.Tensor, rows: np.ndarray, chosen: torch.Tensor
    ) -> list[TokenLogprobs | None]:
        counts = [self._rows.info(row).sampling.num_logprobs for row in rows.tolist()]
        wanted = [index for index, count in enumerate(counts) if count is not None]
        reports: list[TokenLogprobs | None] = [None] * len(counts)
        if wanted:
            found = token_logprobs(raw[wanted], chosen[wanted], [counts[index] or 0 for index in wanted])
            for index, report in zip(wanted, found, strict=True):
                reports[index] = report
        return reports


def explain_row(best: float, edited: bool) -> RowFailure:
    """Why a row whose best score is not finite failed: only edits turn all of a model's numbers into minus infinity."""
    return RowFailure.NO_CHOICE if edited and best == -math.inf else RowFailure.NOT_NUMBERS
