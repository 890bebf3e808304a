"""The fake runner: keeps rows like a real one, says what its script says, takes the time its cost model says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from millpond_engine.engine.runner import RunnerError, RunnerInfo
from millpond_engine.fake.clock import Clock, RealClock
from millpond_engine.fake.cost import CostModel, Faults
from millpond_engine.fake.kv import FakeKv
from millpond_engine.fake.script import Script
from millpond_engine.records.grammar import TokenMasks
from millpond_engine.records.request import SamplingParams
from millpond_engine.records.step import NewRow, RowResult, RowStep, StepPlan, StepResult, TokenLogprobs


@dataclass(slots=True)
class _Row:
    """State of one sequence."""

    tokens: list[int]
    prompt_tokens: int
    table: list[int]
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    min_tokens: int
    start: int
    astray: bool = False
    """A grammar has forbidden what the script says: it is not followed any more."""


@dataclass(slots=True)
class FakePendingStep:
    """A launched step: its result is known but for rows under a grammar, its time has not come."""

    clock: Clock
    due: float
    outcome: StepResult
    finish: Callable[[TokenMasks], tuple[RowResult, ...]] | None = None
    """Runs the rows that wait for masks."""

    def choose(self, masks: TokenMasks) -> None:
        """Choose for the rows that waited."""
        assert self.finish is not None, "masks are for a step with constrained rows, once"
        finish, self.finish = self.finish, None
        outcome = self.outcome
        self.outcome = StepResult(outcome.step, outcome.rows + finish(masks), outcome.seconds)

    def result(self) -> StepResult:
        """Wait until the step would be over."""
        assert self.finish is None, "a step with constrained rows chooses before it is read"
        self.clock.wait_until(self.due)
        return self.outcome


@dataclass(frozen=True, slots=True)
class FakeOptions:
    """How a fake replica behaves."""

    cost: CostModel = field(default_factory=CostModel)
    faults: Faults = field(default_factory=Faults)
    check_kv: bool = False
    """Store token ids in fake blocks and compare them at every read: slow, for tests."""
    preferred_tokens: tuple[int, ...] = ()
    """Said, the first that is allowed, once a grammar has forbidden what the script says."""


class FakeRunner:
    """Runner without a model. Construction takes `cost.load_seconds`.

    Raises:
        RunnerError: from the constructor, when `faults.load_message` is set.
    """

    def __init__(
        self,
        info: RunnerInfo,
        script: Script,
        options: FakeOptions | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._info = info
        self._script = script
        self._options = options or FakeOptions()
        self._clock = clock or RealClock()
        self._rows: dict[int, _Row] = {}
        self._num_steps = 0
        self._busy_until = 0.0
        self._kv = (
            FakeKv(info.num_blocks, info.num_host_blocks, info.block_tokens)
            if self._options.check_kv
            else None
        )
        if self._options.faults.load_message:
            raise RunnerError(self._options.faults.load_message)

    @property
    def info(self) -> RunnerInfo:
        """Facts fixed at load time."""
        return self._info

    @property
    def num_rows(self) -> int:
        """Rows held now; 0 once every sequence has been dropped."""
        return len(self._rows)

    def launch(self, plan: StepPlan) -> FakePendingStep:
        """Start a step.

        Raises:
            RunnerError: on a failing step.
        """
        self._num_steps += 1
        faults = self._options.faults
        assert self._num_steps not in faults.crashing_steps, "a crash was asked for"
        self._prepare(plan)
        if self._num_steps in faults.failing_steps:
            raise RunnerError(f"step {plan.step} was told to fail")
        late = set(plan.constrained)
        results = self._run_rows([step for step in plan.rows if step.row not in late])
        seconds = self._options.cost.compute_step_seconds(plan)
        if self._num_steps in faults.stalling_steps:
            seconds += faults.stall_seconds
        self._busy_until = max(self._busy_until, self._clock.now()) + seconds
        pending = FakePendingStep(self._clock, self._busy_until, StepResult(plan.step, results, seconds))
        if late:
            steps = [step for step in plan.rows if step.row in late]
            pending.finish = lambda masks: self._run_rows(steps, _list_allowed(masks))
        return pending

    def check(self) -> None:
        """Nothing of it can end by itself."""

    def close(self) -> None:
        """Forget every row."""
        self._rows.clear()

    def _prepare(self, plan: StepPlan) -> None:
        for row in plan.dropped_rows:
            self._rows.pop(row, None)
        if self._kv:
            self._kv.move(plan)
        for new in plan.new_rows:
            self._rows[new.row] = self._make_row(new)
        for row, table in plan.replaced_tables:
            self._rows[row].table = list(table)
        for row, token in plan.appended_tokens:
            self._rows[row].tokens.append(token)
        if self._kv:
            self._kv.copy(plan)

    def _make_row(self, new: NewRow) -> _Row:
        seed = None if new.sampling.temperature == 0 else new.seed
        return _Row(
            tokens=list(new.tokens),
            prompt_tokens=new.prompt_tokens,
            table=list(new.block_table),
            sampling=new.sampling,
            stop_token_ids=new.stop_token_ids,
            min_tokens=new.min_tokens,
            start=self._script.start(new.tokens[: new.prompt_tokens], seed),
        )

    def _run_rows(
        self, steps: list[RowStep], allowed: dict[int, frozenset[int]] | None = None
    ) -> tuple[RowResult, ...]:
        masks = allowed or {}
        results = (self._run_row(step, masks.get(step.row)) for step in steps)
        return tuple(result for result in results if result is not None)

    def _run_row(self, step: RowStep, allowed: frozenset[int] | None) -> RowResult | None:
        row = self._rows[step.row]
        row.table.extend(step.new_blocks)
        end = step.start + step.num_tokens
        assert step.num_tokens > 0, f"row {step.row}: a step of no tokens"
        assert end <= len(row.tokens), f"row {step.row}: step to {end}, only {len(row.tokens)} tokens known"
        assert end <= len(row.table) * self._info.block_tokens, (
            f"row {step.row}: no block for position {end - 1}"
        )
        if self._kv:
            self._kv.write(row.table, step.start, row.tokens[step.start : end])
            self._kv.check(row.table, row.tokens[:end])
        prompt_logprobs = self._describe_prompt(row, step) if step.prompt_logprobs else ()
        if step.num_branches:
            return RowResult(
                step.row, branches=self._branch(row, step.num_branches), prompt_logprobs=prompt_logprobs
            )
        if not step.sample:
            return RowResult(step.row, prompt_logprobs=prompt_logprobs) if prompt_logprobs else None
        assert end == len(row.tokens), (
            f"row {step.row}: sampled at {end}, but {len(row.tokens)} tokens are known"
        )
        token = self._choose(row)
        if allowed is not None:
            token = self._choose_allowed(row, allowed, token)
        row.tokens.append(token)
        wanted = row.sampling.num_logprobs
        logprobs = None if wanted is None else self._describe(token, wanted)
        return RowResult(step.row, token=token, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def _choose(self, row: _Row) -> int:
        generated = len(row.tokens) - row.prompt_tokens
        sampling = row.sampling
        token = self._script.next_token(row.start, generated)
        forced = max(sampling.logit_bias, key=lambda pair: pair[1], default=None)
        if forced is not None and forced[1] >= 50:
            token = forced[0]
        if sampling.allowed_token_ids and token not in sampling.allowed_token_ids:
            token = sampling.allowed_token_ids[generated % len(sampling.allowed_token_ids)]
        skipped = 1
        while token in row.stop_token_ids and generated < row.min_tokens:
            token = self._script.next_token(row.start, generated + skipped)
            skipped += 1
            if skipped > 8:  # a script that only ends: say anything else
                token = next(t for t in range(self._info.vocabulary_size) if t not in row.stop_token_ids)
        return token

    def _choose_allowed(self, row: _Row, allowed: frozenset[int], scripted: int) -> int:
        """The script's while it keeps to the grammar, then what ends soon: an end, what the options prefer, the lowest."""
        row.astray = row.astray or scripted not in allowed
        if not row.astray:
            return scripted
        generated = len(row.tokens) - row.prompt_tokens
        ends = row.stop_token_ids if generated >= row.min_tokens else ()
        wanted = (*ends, *self._options.preferred_tokens)
        return next((token for token in wanted if token in allowed), min(allowed, default=0))

    def _describe(self, token: int, num_top: int) -> TokenLogprobs:
        size = self._info.vocabulary_size
        top = tuple(((token + i) % size, -0.125 * (i + 1)) for i in range(num_top))
        return TokenLogprobs(logprob=-0.125, rank=1, top=top)

    def _describe_prompt(self, row: _Row, step: RowStep) -> tuple[TokenLogprobs, ...]:
        end = min(step.start + step.num_tokens + 1, row.prompt_tokens)
        num_top = row.sampling.num_prompt_logprobs or 0
        return tuple(self._describe(row.tokens[i], num_top) for i in range(step.start + 1, end))

    def _branch(self, row: _Row, num_branches: int) -> tuple[tuple[int, float], ...]:
        first = self._script.next_token(row.start, len(row.tokens) - row.prompt_tokens)
        size = self._info.vocabulary_size
        return tuple(((first + i) % size, -0.125 * (i + 1)) for i in range(num_branches))


def _list_allowed(masks: TokenMasks) -> dict[int, frozenset[int]]:
    """Tokens that each row may choose."""
    found = {}
    for line, row in enumerate(masks.rows):
        bits = int.from_bytes(masks.bits[line * masks.row_bytes : (line + 1) * masks.row_bytes], "little")
        found[row] = frozenset(token for token in range(8 * masks.row_bytes) if bits >> token & 1)
    return found
