"""A scheduler for runner tests, as plain as can be: it keeps every row running and makes plans by hand."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from millpond_engine.records.request import SamplingParams
from millpond_engine.records.step import BlockCopy, BlockMove, NewRow, RowResult, RowStep, StepPlan

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class DrivenRow:
    """What the driver remembers of a row."""

    row: int
    tokens: list[int]
    prompt_tokens: int
    wanted: int
    sampling: SamplingParams
    seed: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    results: list[RowResult] = field(default_factory=list)
    new: bool = True
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def done(self) -> bool:
        return len(self.output) >= self.wanted


class PlanDriver:
    """Runs rows to their end under a token budget, over blocks handed out in random order."""

    def __init__(self, runner: Any, *, poison: bool = False) -> None:
        self.runner = runner
        self.block_tokens = runner.info.block_tokens
        self.free = list(range(runner.info.num_blocks))
        self.free_host = list(range(runner.info.num_host_blocks))
        random.Random(7).shuffle(self.free)
        self.rows: dict[int, DrivenRow] = {}
        self.dropped: list[int] = []
        self.step_number = 0
        self.poison = poison

    def add(
        self, prompt: Any, wanted: int, sampling: SamplingParams = GREEDY, seed: int = 0, **extra: Any
    ) -> DrivenRow:
        number = max(self.rows, default=-1) + 1
        row = DrivenRow(number, list(prompt), len(prompt), wanted, sampling, seed, extra=extra)
        self.rows[number] = row
        return row

    def run(self, budget: int = 4096) -> None:
        """Step until every row has what it wants."""
        while any(not row.done for row in self.rows.values()):
            self.step(budget)

    def step(self, budget: int = 4096, **parts: Any) -> None:
        steps, news = [], []
        live = sorted(
            (row for row in self.rows.values() if not row.done),
            key=lambda row: len(row.tokens) - row.computed,
        )
        for row in live:
            count = min(len(row.tokens) - row.computed, budget)
            if not count:
                continue
            budget -= count
            grown = self._grow(row, row.computed + count)
            if row.new:
                news.append(self._new_row(row))
                grown = ()
            sample = row.computed + count == len(row.tokens)
            reports = row.sampling.num_prompt_logprobs is not None and row.computed < row.prompt_tokens
            steps.append(RowStep(row.row, row.computed, count, grown, sample=sample, prompt_logprobs=reports))
            row.computed += count
        self._launch(
            StepPlan(self.step_number, tuple(steps), tuple(news), tuple(self._take_dropped()), **parts)
        )

    def recompute(self, row: DrivenRow) -> None:
        """Preempt: give the blocks back, start again from all known tokens."""
        self._release(row.blocks)
        row.blocks, row.computed, row.new = [], 0, True
        self.dropped.append(row.row)

    def swap(self, row: DrivenRow) -> None:
        """Swap out, spoil the device blocks, swap in at other blocks."""
        moves = [BlockMove(device, self.free_host[i]) for i, device in enumerate(row.blocks)]
        self._launch(StepPlan(self.step_number, (), swap_out=tuple(moves)))
        self.runner.poison_blocks(tuple(row.blocks))
        old, row.blocks = row.blocks, []
        self._grow(row, row.computed)
        self.free = old + self.free
        back = [BlockMove(device, move.host) for device, move in zip(row.blocks, moves, strict=True)]
        table = ((row.row, tuple(row.blocks)),)
        self._launch(StepPlan(self.step_number, (), swap_in=tuple(back), replaced_tables=table))

    def fork(self, row: DrivenRow, wanted: int, sampling: SamplingParams, seed: int) -> DrivenRow:
        """Another continuation of the row: full blocks shared, the partial one copied before its next step."""
        other = self.add(row.tokens, wanted, sampling, seed)
        other.prompt_tokens = row.prompt_tokens
        full = row.computed // self.block_tokens
        other.blocks = row.blocks[:full]
        other.computed = row.computed
        copies = ()
        if row.computed % self.block_tokens:
            target = self.free.pop()
            copies = (BlockCopy(row.blocks[full], target),)
            other.blocks.append(target)
        other.new = False
        self._launch(StepPlan(self.step_number, (), (self._new_row(other),), copies=copies))
        return other

    def finish(self, row: DrivenRow) -> None:
        self._release(row.blocks)
        del self.rows[row.row]
        self.dropped.append(row.row)

    def _launch(self, plan: StepPlan) -> None:
        result = self.runner.launch(plan).result()
        assert result.step == plan.step
        assert not result.failed_rows, result.failed_rows
        self.step_number += 1
        for found in result.rows:
            row = self.rows[found.row]
            row.results.append(found)
            if found.token is not None:
                row.tokens.append(found.token)

    def _new_row(self, row: DrivenRow) -> NewRow:
        row.new = False
        return NewRow(
            row.row,
            row.sampling,
            row.seed,
            tuple(row.tokens),
            row.prompt_tokens,
            tuple(row.blocks),
            **row.extra,
        )

    def _grow(self, row: DrivenRow, tokens: int) -> tuple[int, ...]:
        grown = []
        while len(row.blocks) * self.block_tokens < tokens:
            grown.append(self.free.pop())
            row.blocks.append(grown[-1])
        return tuple(grown)

    def _release(self, blocks: list[int]) -> None:
        if self.poison:
            self.runner.poison_blocks(tuple(blocks))
        self.free[:0] = blocks

    def _take_dropped(self) -> list[int]:
        dropped, self.dropped = self.dropped, []
        return dropped


def generate(
    runner: Any, prompts: list[Any], wanted: int, budget: int = 4096, **options: Any
) -> list[list[int]]:
    """Greedy continuations of all prompts, run together."""
    driver = PlanDriver(runner)
    rows = [driver.add(prompt, wanted, **options) for prompt in prompts]
    driver.run(budget)
    return [row.output for row in rows]
