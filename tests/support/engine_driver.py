"""The real scheduler over a real runner, step by step in one thread, with the integrity check after every step."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from millpond_engine.core.scheduler import Scheduler
from millpond_engine.records.outputs import Preempted
from millpond_engine.records.request import BeamParams, Request, SamplingParams, StopParams
from millpond_engine.records.settings import SchedulerSettings
from millpond_engine.records.step import TokenLogprobs


@dataclass
class Choice:
    """What one choice of a request got."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    stop_token: int | None = None
    score: float | None = None
    finish: str = ""


class EngineDriver:
    """Adds requests and runs until nothing is left to do."""

    def __init__(self, runner: Any, *, poison: bool = False, **settings: Any) -> None:
        self.runner = runner
        self.scheduler = Scheduler(SchedulerSettings(**settings), runner.info)
        self.choices: dict[str, dict[int, Choice]] = {}
        self.prompts: dict[str, Any] = {}
        self.preemptions: list[Preempted] = []
        self.plans: list[Any] = []
        self._poison = poison
        self._ids = itertools.count()
        self._now = 0.0

    def add(
        self, prompt: Any, max_tokens: int, sampling: SamplingParams | None = None, *, beam: BeamParams | None = None,
        n: int = 1, ignore_eos: bool = True, **stop: Any,
    ) -> str:  # fmt: skip
        request_id = f"r{next(self._ids)}"
        request = Request(
            request_id=request_id,
            prompt=tuple(prompt),
            sampling=sampling or SamplingParams(temperature=0.0),
            stop=StopParams(max_tokens=max_tokens, ignore_eos=ignore_eos, **stop),
            arrival_seconds=self._now,
            n=n,
            best_of=n,
            beam=beam,
        )
        assert self.scheduler.add(request, self._now) is None
        self.choices[request_id] = {}
        return request_id

    def run(self) -> None:
        while self.scheduler.has_work():
            self.step()

    def step(self) -> None:
        self._now += 0.01
        plan = self.scheduler.plan(self._now)
        self.plans.append(plan)
        if self._poison:
            self._spoil_free_blocks(plan)
        result = self.runner.launch(plan).result()
        assert not result.failed_rows, result.failed_rows
        output = self.scheduler.update(plan, result, self._now)
        self.scheduler.check_integrity()
        self.preemptions.extend(output.preemptions)
        assert not output.refusals
        for prompt in output.prompts:
            self.prompts[prompt.request_id] = prompt
        for news in output.sequences:
            choice = self.choices[news.request_id].setdefault(news.index, Choice())
            choice.tokens.extend(news.tokens)
            choice.logprobs.extend(news.logprobs)
            if news.finish is not None:
                choice.finish, choice.stop_token, choice.score = (
                    news.finish.value,
                    news.stop_token,
                    news.score,
                )

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return self.choices[request_id][index].tokens

    def _spoil_free_blocks(self, plan: Any) -> None:
        """NaN into blocks that this step hands out: what they held before must never be read."""
        fresh = [block for row in plan.rows for block in row.new_blocks]
        known = {row.row: row for row in plan.rows}
        for new in plan.new_rows:
            if new.row in known and known[new.row].start == 0:
                fresh.extend(new.block_table)
        read_first = {move.device for move in plan.swap_out} | {copy.source for copy in plan.copies}
        self.runner.poison_blocks(tuple(block for block in fresh if block not in read_first))
