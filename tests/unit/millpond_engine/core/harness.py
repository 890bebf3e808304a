"""A scripted runner that stores tokens where KV would be, and a small engine loop around the scheduler.

Every read is checked: a row's table must hold exactly the row's tokens up to what the step computes.
What the model would say is a pure function of the whole history, so a wrong history shows in the text.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from millpond_engine.core.scheduler import Scheduler
from millpond_engine.engine.speeds import SpeedMeter, make_sample
from millpond_engine.records.capacity import Capacity
from millpond_engine.records.outputs import StepOutput
from millpond_engine.records.request import (
    BeamParams,
    FinishReason,
    Refusal,
    Request,
    SamplingParams,
    StopParams,
)
from millpond_engine.records.settings import SchedulerSettings
from millpond_engine.records.step import NewRow, RowResult, RowStep, StepPlan, StepResult, TokenLogprobs

VOCABULARY = 1000
POISON = -1
GREEDY = SamplingParams(temperature=0.0, seed=0)


def crc(tokens: Sequence[int], seed: int = 0) -> int:
    return zlib.crc32(array("I", tokens).tobytes(), seed & 0xFFFFFFFF)


def say(tokens: Sequence[int], seed: int) -> int:
    """The next token after this history."""
    return crc(tokens, seed) % VOCABULARY


def rank_branches(tokens: Sequence[int], number: int) -> tuple[tuple[int, float], ...]:
    """The most likely next tokens after this history."""
    start = crc(tokens)
    choices = [((start + 7 * i) % VOCABULARY, -0.05 - ((start >> i) % 97) / 40) for i in range(number)]
    return tuple(sorted(choices, key=lambda choice: -choice[1]))


@dataclass
class Row:
    new: NewRow
    tokens: list[int]
    table: list[int]
    next: int | None = None
    """Where the row's next step must start: nothing is skipped or computed twice while it lives."""


@dataclass
class TokenRunner:
    capacity: Capacity
    say: Callable[[Sequence[int], int], int] = say
    branch: Callable[[Sequence[int], int], tuple[tuple[int, float], ...]] = rank_branches
    rows: dict[int, Row] = field(default_factory=dict)
    computed_tokens: int = 0

    def __post_init__(self) -> None:
        size = self.capacity.block_tokens
        self.device = [[POISON] * size for _ in range(self.capacity.num_blocks)]
        self.host = [[POISON] * size for _ in range(self.capacity.num_host_blocks)]

    def run(self, plan: StepPlan) -> StepResult:
        for row in plan.dropped_rows:
            del self.rows[row]
        for move in plan.swap_out:
            self.host[move.host] = list(self.device[move.device])
        for move in plan.swap_in:
            self.device[move.device] = list(self.host[move.host])
        for new in plan.new_rows:
            assert new.row not in self.rows, f"row {new.row} is still there"
            self.rows[new.row] = Row(new, list(new.tokens), list(new.block_table))
        for row, table in plan.replaced_tables:
            self.rows[row].table = list(table)
        for row, token in plan.appended_tokens:
            self.rows[row].tokens.append(token)
        contents = [(copy.target, list(self.device[copy.source])) for copy in plan.copies]
        for target, content in contents:
            self.device[target] = content
        for step in plan.rows:  # all writes of a step come before its reads would be wrong
            self._write(step)
        results = [self._compute(step) for step in plan.rows]
        self.computed_tokens += plan.num_tokens
        return StepResult(plan.step, tuple(results), seconds=0.01)

    def _write(self, step: RowStep) -> None:
        row = self.rows[step.row]
        row.table.extend(step.new_blocks)
        end = step.start + step.num_tokens
        assert step.num_tokens > 0, "a planned row computes nothing"
        assert row.next in {None, step.start}, f"row {step.row} starts at {step.start}, not {row.next}"
        row.next = end
        assert end <= len(row.tokens), "tokens are computed that nobody knows"
        assert len(set(row.table)) == len(row.table), "a block is twice in a table"
        for position in range(step.start, end):
            block, slot = divmod(position, self.capacity.block_tokens)
            self.device[row.table[block]][slot] = row.tokens[position]

    def _compute(self, step: RowStep) -> RowResult:
        row = self.rows[step.row]
        end = step.start + step.num_tokens
        size = self.capacity.block_tokens
        held = [self.device[row.table[p // size]][p % size] for p in range(end)]
        assert held == row.tokens[:end], f"row {step.row} reads another sequence's KV"
        prompt: tuple[TokenLogprobs, ...] = ()
        if step.prompt_logprobs:
            last = min(end + 1, row.new.prompt_tokens)
            prompt = tuple(TokenLogprobs(-float(p), 1) for p in range(step.start + 1, last))
        if step.num_branches:
            assert end == len(row.tokens)
            return RowResult(
                step.row, branches=self.branch(row.tokens, step.num_branches), prompt_logprobs=prompt
            )
        if not step.sample:
            return RowResult(step.row, prompt_logprobs=prompt)
        assert end == len(row.tokens), "a token is sampled in the middle"
        token = self.choose(row)
        row.tokens.append(token)
        logprobs = None
        if row.new.sampling.num_logprobs is not None:
            logprobs = TokenLogprobs(-(token % 89) / 10, 1)
        return RowResult(step.row, token=token, logprobs=logprobs, prompt_logprobs=prompt)

    def choose(self, row: Row) -> int:
        token = self.say(row.tokens, row.new.seed)
        if len(row.tokens) - row.new.prompt_tokens < row.new.min_tokens:
            while token in row.new.stop_token_ids:
                token = (token + 1) % VOCABULARY
        return token

    def poison(self, blocks: Sequence[int]) -> None:
        """Make reads of freed blocks show."""
        for block in blocks:
            self.device[block] = [POISON] * self.capacity.block_tokens


@dataclass
class CountingGuide:
    """Ends after so many tokens; which ones they are, the test compares."""

    length: int
    num_taken: int = 0
    failure: str = ""

    def advance(self, token: int) -> bool:
        self.num_taken += 1
        assert self.num_taken <= self.length, "a token after the end"
        return self.num_taken == self.length


@dataclass
class CountingGrammar:
    length: int
    num_taken: int = 0
    failed: bool = False

    def start(self) -> CountingGuide:
        return CountingGuide(self.length)


@dataclass
class Outcome:
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_token: int | None = None
    score: float | None = None
    num_reports: int = 0


class Loop:
    """Scheduler and runner joined; `overlap` plans and launches one step ahead."""

    def __init__(
        self,
        settings: SchedulerSettings | None = None,
        capacity: Capacity | None = None,
        *,
        overlap: bool = False,
        check: bool = True,
        optimistic: bool = False,
        runner: TokenRunner | None = None,
    ) -> None:
        self.settings = settings or SchedulerSettings(policy="Fifo")
        self.capacity = capacity or Capacity(num_blocks=64, block_tokens=4, max_model_tokens=256)
        self.scheduler = Scheduler(self.settings, self.capacity)
        self.runner = runner or TokenRunner(self.capacity)
        if optimistic:  # admit as if nobody grew: the more is preempted
            self.scheduler._state.estimate.compute_remaining = lambda *_: 0
        self.num_preempted_in_flight = 0
        self.overlap = overlap
        self.check = check
        self.now = 0.0
        self.num_steps = 0
        self.requests: dict[str, Request] = {}
        self.outcomes: dict[tuple[str, int], Outcome] = {}
        self.finished: list[str] = []
        self.refusals: dict[str, Refusal] = {}
        self.cached: dict[str, int] = {}
        self.prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
        self.preemptions: dict[str, int] = {}
        self.outputs: list[StepOutput] = []
        self.speeds = SpeedMeter()
        self.plans: list[StepPlan] = []
        self.first_token_step: dict[str, int] = {}
        self.flight: tuple[StepPlan, StepResult] | None = None

    @property
    def state(self):
        return self.scheduler._state

    def add(self, request: Request) -> Refusal | None:
        self.requests[request.request_id] = request
        refusal = self.scheduler.add(request, self.now)
        if refusal is not None:
            self.refusals[request.request_id] = refusal
        return refusal

    def abort(self, request_id: str) -> bool:
        return self.scheduler.abort(request_id, self.now)

    def step(self) -> StepPlan:
        """Plan and run one step; with overlap, read the step before it."""
        self.now += 0.01
        self.num_steps += 1
        if not self.scheduler.has_work():
            assert self.flight is not None
            (plan, result), self.flight = self.flight, None
            self.read(plan, result)
            return plan
        plan = self.scheduler.plan(self.now)
        self.plans.append(plan)
        self._check_plan(plan)
        self.num_preempted_in_flight += sum(s.flights for group in self.state.queue for s in group.waiting)
        result = self.runner.run(plan)
        if self.overlap:
            previous, self.flight = self.flight, (plan, result)
            if previous is not None:
                self.read(*previous)
        else:
            self.read(plan, result)
        return plan

    def read(self, plan: StepPlan, result: StepResult) -> None:
        guides = self.scheduler.list_guides(plan)
        assert {row for row, _ in guides} <= set(plan.constrained)
        self.take(self.scheduler.update(plan, result, self.now))
        self.speeds.add(make_sample(plan, result.seconds))
        self.scheduler.learn_speed(self.speeds.prefill_tokens_per_second)

    def take(self, output: StepOutput) -> None:
        self.outputs.append(output)
        for news in output.sequences:
            outcome = self.outcomes.setdefault((news.request_id, news.index), Outcome())
            assert outcome.finish is None, f"news of {news.request_id} after its end"
            outcome.tokens += news.tokens
            outcome.num_reports += 1
            outcome.finish, outcome.stop_token, outcome.score = news.finish, news.stop_token, news.score
            self.first_token_step.setdefault(news.request_id, self.num_steps)
        for prompt in output.prompts:
            assert prompt.request_id not in self.cached, "a prompt is reported twice"
            self.cached[prompt.request_id] = prompt.cached_tokens
            self.prompt_logprobs[prompt.request_id] = prompt.prompt_logprobs
        for request_id in output.finished_requests:
            assert request_id not in self.finished
            self.finished.append(request_id)
        for refusal in output.refusals:
            self.refusals[refusal.request_id] = refusal
        for preempted in output.preemptions:
            self.preemptions[preempted.request_id] = self.preemptions.get(preempted.request_id, 0) + 1
        if self.check:
            self.check_now()

    def check_now(self) -> None:
        self.scheduler.check_integrity()
        self.runner.poison(self.state.cache.pool.walk(0))

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.settings.max_batch_tokens, "the budget is overdrawn"
        assert len({row.row for row in plan.rows}) == len(plan.rows)
        if not plan.rows and self.flight is None:
            assert not self.scheduler.has_work(), (
                f"nothing planned though work waits: {self.scheduler.counts()}"
            )

    def run(self, *, max_steps: int = 10_000) -> None:
        """Step until nothing is left."""
        for _ in range(max_steps):
            if not self.scheduler.has_work() and self.flight is None:
                self.check_now()
                return
            self.step()
        raise AssertionError(f"still working after {max_steps} steps: {self.scheduler.counts()}")

    def run_steps(self, number: int) -> None:
        for _ in range(number):
            self.step()

    def output(self, request_id: str, index: int = 0) -> list[int]:
        return self.outcomes[request_id, index].tokens

    def assert_idle(self) -> None:
        """All blocks are free or cached, nothing is leased, no row and no host block is taken."""
        counts = self.scheduler.counts()
        assert counts.used_blocks == 0
        assert counts.leaked_blocks == 0
        assert counts.free_blocks + counts.cached_blocks == self.capacity.num_blocks
        assert counts.used_host_blocks == 0
        assert len(self.state.free_rows) == self.settings.max_sequences


def make_request(
    request_id: str,
    prompt: Sequence[int] | int,
    max_tokens: int = 8,
    *,
    sampling: SamplingParams | None = None,
    min_tokens: int = 0,
    stop: Sequence[int] = (),
    beam: BeamParams | None = None,
    **rest,
) -> Request:
    """A request; a number as prompt stands for that many tokens that no other request id shares."""
    if isinstance(prompt, int):
        start = zlib.crc32(request_id.encode())
        prompt = [(start + 13 * i * i + i) % VOCABULARY for i in range(prompt)]
    return Request(
        request_id=request_id,
        prompt=tuple(prompt),
        sampling=sampling or GREEDY,
        stop=StopParams(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=tuple(stop)),
        arrival_seconds=rest.pop("arrival_seconds", 0.0),
        beam=beam,
        **rest,
    )


def expect(request: Request, seed: int = 0, *, talk: Callable[[Sequence[int], int], int] = say) -> list[int]:
    """What a request alone on an endless machine generates."""
    tokens = list(request.prompt)
    for number in range(request.stop.max_tokens):
        token = talk(tokens, seed)
        ends = request.stop.stop_token_ids
        if token in ends:
            if number >= request.stop.min_tokens:
                break
            while token in ends:
                token = (token + 1) % VOCABULARY
        tokens.append(token)
    return tokens[len(request.prompt) :]
