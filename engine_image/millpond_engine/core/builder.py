"""The step under construction: what it gives can be taken back until it is sealed."""

from __future__ import annotations

from millpond_engine.core.sequence import NO_ROW_TOLD, Sequence, mix_seed
from millpond_engine.records.step import BlockCopy, BlockMove, NewRow, RowStep, StepPlan


class PlanBuilder:
    """Collects the work of one step and keeps the sequences' counters in line with it."""

    def __init__(self, step: int, budget: int) -> None:
        self.step = step
        self.budget = budget
        """Tokens that can still be handed out."""
        self.starts: dict[Sequence, int] = {}
        """Sequences with work in this step, and how many of their tokens were computed before it."""
        self.copies: dict[Sequence, BlockCopy] = {}
        self.copied: set[Sequence] = set()
        """Sequences that got a copy in this step, even if it was taken back."""
        self.swap_out: list[BlockMove] = []
        self.swap_in: list[BlockMove] = []
        self.num_preempted = 0
        """Victims of growth in this step; while there are some, nobody new is let in."""

    def schedule(self, sequence: Sequence, num_tokens: int) -> None:
        """Let a sequence compute its next tokens, whose blocks are in its table; asked again, more of them."""
        if sequence not in self.starts:
            self.starts[sequence] = sequence.computed
            sequence.flights += 1
            sequence.last_step = self.step
        sequence.computed += num_tokens
        if sequence.ready_step < 0 and sequence.computed >= sequence.prompt_tokens:
            sequence.ready_step = self.step
        sequence.group.account.tokens += num_tokens
        self.budget -= num_tokens

    def copy_block(self, sequence: Sequence, source: int, target: int) -> None:
        """Copy a block before the forward pass; a sequence needs at most one copy a step."""
        self.copies[sequence] = BlockCopy(source, target)
        self.copied.add(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Take back what this step gave to a sequence; its tokens return to the budget."""
        self.copies.pop(sequence, None)
        start = self.starts.pop(sequence, None)
        if start is None:
            return
        num_tokens = sequence.computed - start
        self.budget += num_tokens
        sequence.group.account.tokens -= num_tokens
        sequence.computed = start
        sequence.flights -= 1
        if sequence.ready_step == self.step:
            sequence.ready_step = -1

    def list_copy_sources(self) -> set[int]:
        """Blocks that must keep their content until the step has run."""
        return {copy.source for copy in self.copies.values()}

    @property
    def empty(self) -> bool:
        """Nothing to do for the runner."""
        return not (self.starts or self.swap_out or self.swap_in)

    def seal(self, dropped_rows: tuple[int, ...]) -> StepPlan:
        """Make the plan, with what the runner does not know yet; decodes first, as they were scheduled."""
        rows: list[RowStep] = []
        new_rows: list[NewRow] = []
        tables: list[tuple[int, tuple[int, ...]]] = []
        appended: list[tuple[int, int]] = []
        constrained: list[int] = []
        for sequence, start in self.starts.items():
            row, table, told = sequence.row, sequence.table, sequence.told
            new_blocks: tuple[int, ...] = ()
            if told == NO_ROW_TOLD:
                new_rows.append(_make_new_row(sequence))
            elif told == 0:
                tables.append((row, tuple(table)))
            elif told < len(table):
                new_blocks = tuple(table[told:])
            sequence.told = len(table)
            if sequence.chosen is not None:
                if told != NO_ROW_TOLD:
                    appended.append((row, sequence.chosen))
                sequence.chosen = None
            step = _make_step(sequence, start, new_blocks)
            rows.append(step)
            if step.sample and sequence.group.request.grammar is not None:
                constrained.append(row)
        return StepPlan(
            step=self.step,
            rows=tuple(rows),
            new_rows=tuple(new_rows),
            dropped_rows=dropped_rows,
            replaced_tables=tuple(tables),
            appended_tokens=tuple(appended),
            copies=tuple(self.copies.values()),
            swap_out=tuple(self.swap_out),
            swap_in=tuple(self.swap_in),
            constrained=tuple(constrained),
        )


def _make_step(sequence: Sequence, start: int, new_blocks: tuple[int, ...]) -> RowStep:
    """The row's work; a row whose last known token is computed chooses the next one."""
    group, computed = sequence.group, sequence.computed
    total = len(sequence.tokens) + sequence.pending
    samples = computed == total < sequence.limit
    branches = group.branching if samples else 0
    if samples and not branches:
        sequence.pending += 1
    wants_prompt = start < sequence.prompt_tokens and group.wants_prompt_logprobs
    return RowStep(sequence.row, start, computed - start, new_blocks, samples, wants_prompt, branches)


def _make_new_row(sequence: Sequence) -> NewRow:
    group, request = sequence.group, sequence.group.request
    return NewRow(
        row=sequence.row,
        sampling=group.sampling,
        seed=mix_seed(group.seed, sequence.index),
        tokens=tuple(sequence.tokens),
        prompt_tokens=sequence.prompt_tokens,
        block_table=tuple(sequence.table),
        stop_token_ids=tuple(sorted(group.ends)),
        min_tokens=request.stop.min_tokens,
        adapter=request.adapter,
        constrained=request.grammar is not None,
        request_id=request.request_id,
    )
