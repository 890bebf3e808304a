"""The step under construction: rows can be taken back until it is sealed."""

from __future__ import annotations

from millpond_engine.core.sequence import Sequence
from millpond_engine.records.step import BlockCopy, BlockMove, NewRow, RowStep, StepPlan


class PlanBuilder:
    """Collects the work of one step and keeps the sequences' counters in line with it."""

    def __init__(self, step: int, budget: int) -> None:
        self.step = step
        self.budget = budget
        """Tokens that can still be handed out."""
        self.rows: dict[Sequence, RowStep] = {}
        self.copies: dict[Sequence, BlockCopy] = {}
        self.copied: set[Sequence] = set()
        """Sequences that got a copy in this step, even if it was taken back."""
        self.swap_out: list[BlockMove] = []
        self.swap_in: list[BlockMove] = []
        self.num_preempted = 0
        """Victims of growth in this step; while there are some, nobody new is let in."""
        self._new_rows: dict[Sequence, NewRow] = {}
        self._tables: dict[Sequence, tuple[int, tuple[int, ...]]] = {}
        self._appended: dict[Sequence, tuple[int, int]] = {}

    def schedule(self, sequence: Sequence, num_tokens: int, new_blocks: tuple[int, ...]) -> None:
        """Let a sequence compute its next tokens, whose blocks are in its table."""
        start = sequence.computed
        end = start + num_tokens
        total = sequence.num_tokens
        samples = end == total and total < sequence.limit
        if sequence.fresh or sequence.dirty or sequence.chosen is not None:
            new_blocks = self._inform(sequence, new_blocks)
        wants_prompt = (
            not sequence.plain and start < sequence.prompt_tokens and not sequence.group.prompt_reported
        )
        branches = sequence.branching if samples else 0
        self.rows[sequence] = RowStep(
            sequence.row, start, num_tokens, new_blocks, samples, wants_prompt, branches
        )
        sequence.computed = end
        if samples and not branches:
            sequence.pending = 1
        sequence.flights += 1
        sequence.last_step = self.step
        if sequence.ready_step < 0 and end >= sequence.prompt_tokens:
            sequence.ready_step = self.step
        sequence.account.tokens += num_tokens
        self.budget -= num_tokens

    def extend(self, sequence: Sequence, num_tokens: int, new_blocks: tuple[int, ...]) -> None:
        """Enlarge the chunk of a scheduled prefill."""
        row, copy = self.rows[sequence], self.copies.get(sequence)
        sequence.dirty = sequence in self._tables
        self.cancel(sequence)
        if copy is not None:
            self.copies[sequence] = copy
        self.schedule(sequence, row.num_tokens + num_tokens, row.new_blocks + new_blocks)

    def copy_block(self, sequence: Sequence, source: int, target: int) -> None:
        """Copy a block before the forward pass; a sequence needs at most one copy a step."""
        self.copies[sequence] = BlockCopy(source, target)
        self.copied.add(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Take back what this step gave to a sequence; its tokens return to the budget."""
        self.copies.pop(sequence, None)
        row = self.rows.pop(sequence, None)
        if row is None:
            return
        self.budget += row.num_tokens
        sequence.account.tokens -= row.num_tokens
        sequence.computed = row.start
        sequence.flights -= 1
        if row.sample and not row.num_branches:
            sequence.pending = 0
        if sequence.ready_step == self.step:
            sequence.ready_step = -1
        self._tables.pop(sequence, None)
        self._appended.pop(sequence, None)
        if self._new_rows.pop(sequence, None):
            sequence.fresh = True

    def list_copy_sources(self) -> set[int]:
        """Blocks that must keep their content until the step has run."""
        return {copy.source for copy in self.copies.values()}

    @property
    def empty(self) -> bool:
        """Nothing to do for the runner."""
        return not (self.rows or self.swap_out or self.swap_in)

    def seal(self, dropped_rows: tuple[int, ...]) -> StepPlan:
        """Make the plan: decodes first, as they were scheduled."""
        return StepPlan(
            step=self.step,
            rows=tuple(self.rows.values()),
            new_rows=tuple(self._new_rows.values()),
            dropped_rows=dropped_rows,
            replaced_tables=tuple(self._tables.values()),
            appended_tokens=tuple(self._appended.values()),
            copies=tuple(self.copies.values()),
            swap_out=tuple(self.swap_out),
            swap_in=tuple(self.swap_in),
        )

    def _inform(self, sequence: Sequence, new_blocks: tuple[int, ...]) -> tuple[int, ...]:
        """Tell the runner a row, its whole table or a chosen token; returns the blocks left to append."""
        if sequence.fresh:
            self._new_rows[sequence] = _make_new_row(sequence)
            new_blocks = ()
        else:
            if sequence.dirty:
                self._tables[sequence] = (sequence.row, tuple(sequence.table))
                new_blocks = ()
            if sequence.chosen is not None:
                self._appended[sequence] = (sequence.row, sequence.chosen)
        sequence.fresh = sequence.dirty = False
        sequence.chosen = None
        return new_blocks


def _make_new_row(sequence: Sequence) -> NewRow:
    group = sequence.group
    return NewRow(
        row=sequence.row,
        sampling=group.sampling,
        seed=sequence.seed,
        tokens=tuple(sequence.tokens),
        prompt_tokens=sequence.prompt_tokens,
        block_table=tuple(sequence.table),
        stop_token_ids=tuple(sorted(group.ends)),
        min_tokens=group.request.stop.min_tokens,
        adapter=group.request.adapter,
        request_id=group.request.request_id,
    )
