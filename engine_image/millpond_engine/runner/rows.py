"""The runner's state: one line per sequence with its tokens and block table, kept between steps."""

from __future__ import annotations

import numpy as np
import torch

from millpond_engine.kernels.inputs import StepInputs
from millpond_engine.records.step import NewRow, RowStep, StepPlan

_FIRST_ROWS = 64


class RowTable:
    """Tokens and block tables of all rows in two matrices that grow by doubling."""

    def __init__(self, *, max_tokens: int, block_tokens: int) -> None:
        self._max_blocks = -(-max_tokens // block_tokens)
        self._max_tokens = max_tokens
        self._infos: dict[int, NewRow] = {}
        self._num_blocks: dict[int, int] = {}
        self._allocate(_FIRST_ROWS)

    def apply(self, plan: StepPlan) -> None:
        """Bring the state up to date with a plan: drops, new rows, tables, appended tokens and blocks."""
        for row in plan.dropped_rows:
            self._infos.pop(row, None)
            self._num_blocks.pop(row, None)
        for new in plan.new_rows:
            self._add(new)
        for row, table in plan.replaced_tables:
            self._set_table(row, table)
        for row, token in plan.appended_tokens:
            self.append_token(row, token)
        for step in plan.rows:
            if step.new_blocks:
                self._extend_table(step.row, step.new_blocks)

    def info(self, row: int) -> NewRow:
        """What the scheduler said about the row when it was new."""
        return self._infos[row]

    def length(self, row: int) -> int:
        """Tokens known so far."""
        return int(self.lengths[row])

    def append_token(self, row: int, token: int) -> None:
        """Add one token behind the last."""
        self.tokens[row, self.lengths[row]] = token
        self.lengths[row] += 1

    def append_tokens(self, rows: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> None:
        """Put one token of each row at its position; the row then ends there."""
        fits = (
            positions < self._max_tokens
        )  # the token after the last position has nowhere to go and is never computed
        self.tokens[rows[fits], positions[fits]] = tokens[fits]
        self.lengths[rows] = positions + 1

    def inputs(self, steps: tuple[RowStep, ...]) -> tuple[StepInputs, torch.Tensor]:
        """Flatten the steps' tokens into one batch; the second value is their ids, `[num_tokens]`."""
        rows = np.fromiter((step.row for step in steps), np.int32, len(steps))
        starts = np.fromiter((step.start for step in steps), np.int32, len(steps))
        counts = np.fromiter((step.num_tokens for step in steps), np.int32, len(steps))
        offsets = np.zeros(len(steps) + 1, np.int32)
        np.cumsum(counts, out=offsets[1:])
        num_tokens = int(offsets[-1])
        if num_tokens == len(steps):  # decodes only
            positions, token_rows = starts.astype(np.int64), rows
        else:
            positions = np.arange(num_tokens, dtype=np.int64) + np.repeat(starts - offsets[:-1], counts)
            token_rows = np.repeat(rows, counts)
        inputs = StepInputs(
            rows=torch.from_numpy(rows),
            starts=torch.from_numpy(starts),
            query_offsets=torch.from_numpy(offsets),
            positions=torch.from_numpy(positions),
            block_tables=self.block_tables,
            num_tokens=num_tokens,
        )
        return inputs, torch.from_numpy(self.tokens[token_rows, positions])

    def _add(self, new: NewRow) -> None:
        if new.row >= len(self.lengths):
            self._grow(new.row + 1)
        self.tokens[new.row, : len(new.tokens)] = new.tokens
        self.lengths[new.row] = len(new.tokens)
        self._infos[new.row] = new
        self._set_table(new.row, new.block_table)

    def _set_table(self, row: int, table: tuple[int, ...]) -> None:
        self._tables[row, : len(table)] = table
        self._num_blocks[row] = len(table)

    def _extend_table(self, row: int, blocks: tuple[int, ...]) -> None:
        first = self._num_blocks[row]
        self._tables[row, first : first + len(blocks)] = blocks
        self._num_blocks[row] = first + len(blocks)

    def _allocate(self, num_rows: int) -> None:
        self.tokens = np.zeros((num_rows, self._max_tokens), np.int32)
        self.lengths = np.zeros(num_rows, np.int64)
        self._tables = np.zeros((num_rows, self._max_blocks), np.int32)
        self.block_tables = torch.from_numpy(self._tables)

    def _grow(self, wanted: int) -> None:
        tokens, lengths, tables = self.tokens, self.lengths, self._tables
        self._allocate(max(wanted, 2 * len(lengths)))
        self.tokens[: len(lengths)] = tokens
        self.lengths[: len(lengths)] = lengths
        self._tables[: len(lengths)] = tables
