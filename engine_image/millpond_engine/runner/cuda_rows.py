"""The state table on the device: tokens and block tables of all rows, updated in place by what a plan brings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from millpond_engine.kernels.gpu.attention import gather_tokens
from millpond_engine.kernels.inputs import StepInputs
from millpond_engine.records.step import NewRow, RowStep, StepPlan
from millpond_engine.runner.cuda_runtime import Array, DeviceRuntime, upload_columns


class DeviceRows:
    """One line per row at a fixed address, because graphs hold it.

    A sampled token goes from the sampler to its line without passing the host: the next step can be launched before
    it is known there.
    """

    def __init__(self, runtime: DeviceRuntime, *, max_rows: int, max_tokens: int, block_tokens: int) -> None:
        self._runtime = runtime
        self._infos: dict[int, NewRow] = {}
        self._lengths = np.zeros(max_rows, np.int64)
        self._num_blocks = np.zeros(max_rows, np.int64)
        self._tables = np.zeros((max_rows, -(-max_tokens // block_tokens)), np.int32)
        # one column more than the longest sequence: the token after its last has a place and is never computed
        self.tokens = torch.zeros((max_rows, max_tokens + 1), dtype=torch.int32, device=runtime.device)
        self.block_tables = torch.zeros(self._tables.shape, dtype=torch.int32, device=runtime.device)

    def apply(self, plan: StepPlan) -> None:
        """Bring the state up to date with a plan: drops, new rows, tables, appended tokens and blocks."""
        for row in plan.dropped_rows:
            self._infos.pop(row, None)
        tokens: list[tuple[int, int, Sequence[int]]] = []
        changed: list[tuple[int, int, int]] = []
        for new in plan.new_rows:
            self._infos[new.row] = new
            self._lengths[new.row] = len(new.tokens)
            tokens.append((new.row, 0, new.tokens))
            changed.append(self._set_table(new.row, 0, new.block_table))
        changed.extend(self._set_table(row, 0, table) for row, table in plan.replaced_tables)
        for row, token in plan.appended_tokens:
            tokens.append((row, int(self._lengths[row]), (token,)))
            self._lengths[row] += 1
        changed.extend(
            self._set_table(step.row, int(self._num_blocks[step.row]), step.new_blocks)
            for step in plan.rows
            if step.new_blocks
        )
        self._write_tokens(tokens)
        self._write_tables(changed)

    def info(self, row: int) -> NewRow:
        """What the scheduler said about the row when it was new."""
        return self._infos[row]

    def inputs(self, rows: Array, starts: Array, counts: Array) -> tuple[StepInputs, torch.Tensor]:
        """Flatten a step of int32 `[num_rows]` arrays into one batch; the second value is the tokens' ids."""
        offsets = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=offsets[1:])
        many = counts != 1
        first = np.zeros(1, np.int32)
        columns = upload_columns(self._runtime, [np.append(rows, first), np.append(starts, first), offsets])
        return self.gather(
            columns[0][:-1],
            columns[1][:-1],
            columns[2],
            num_tokens=int(offsets[-1]),
            num_decodes=int(many.argmax()) if many.any() else len(rows),
        )

    def gather(
        self,
        rows: torch.Tensor,
        starts: torch.Tensor,
        offsets: torch.Tensor,
        *,
        num_tokens: int,
        num_decodes: int,
    ) -> tuple[StepInputs, torch.Tensor]:
        """The same from tensors that are on the device already."""
        ids, positions = gather_tokens(
            self.tokens, rows=rows, starts=starts, offsets=offsets, num_tokens=num_tokens
        )
        inputs = StepInputs(rows, starts, offsets, positions, self.block_tables, num_tokens, num_decodes)
        return inputs, ids

    def store_tokens(self, rows: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        """Put one token of each row at its position, all int64 `[num_rows]` on the device."""
        self.tokens.view(-1).index_copy_(0, rows * self.tokens.shape[1] + positions, tokens.int())

    def note_lengths(self, steps: Sequence[RowStep]) -> None:
        """These rows end behind the token that their step samples."""
        for step in steps:
            self._lengths[step.row] = step.start + step.num_tokens + 1

    def _set_table(self, row: int, first: int, blocks: tuple[int, ...]) -> tuple[int, int, int]:
        last = first + len(blocks)
        self._tables[row, first:last] = blocks
        self._num_blocks[row] = last
        return row, first, last

    def _write_tokens(self, writes: list[tuple[int, int, Sequence[int]]]) -> None:
        width = self.tokens.shape[1]
        places = [
            row * width + column + np.arange(len(values), dtype=np.int64) for row, column, values in writes
        ]
        if places:
            values = np.concatenate([np.asarray(values, np.int64) for _, _, values in writes])
            self._write(self.tokens, np.concatenate(places), values)

    def _write_tables(self, changed: list[tuple[int, int, int]]) -> None:
        """Send what the host holds now: a place that changed twice has one value."""
        width = self._tables.shape[1]
        places = [np.arange(row * width + first, row * width + last) for row, first, last in changed]
        if places:
            flat = np.concatenate(places)
            self._write(self.block_tables, flat, self._tables.reshape(-1)[flat])

    def _write(self, target: torch.Tensor, places: Array, values: Array) -> None:
        if len(places):
            index, content = upload_columns(self._runtime, [places, values.astype(np.int64)])
            target.view(-1).index_copy_(0, index, content.int())
