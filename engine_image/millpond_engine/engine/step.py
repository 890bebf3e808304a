"""The step: plan, launch, wait, update; with overlap, step n+1 is planned and launched before step n is read.

A step with rows under a grammar chooses its tokens apart: what such a row may say depends on the token before, so the
masks are made, and the choice is launched, when step n has been read. The forward pass of step n+1 runs meanwhile.

Errors:
    RunnerError of a step is turned into failed requests by the scheduler; the engine goes on.
    Anything else is a defect of ours and leaves `step` as it is: the loop ends, state may be corrupt.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from millpond_engine.engine.runner import PendingStep, Runner, RunnerError
from millpond_engine.records.grammar import Guide, TokenMasks
from millpond_engine.records.outputs import CacheEvent, SchedulerCounts, StepOutput
from millpond_engine.records.request import Refusal, Request
from millpond_engine.records.step import StepPlan, StepResult


class SchedulerFace(Protocol):
    """What the engine needs of `core.scheduler.Scheduler`."""

    def add(self, request: Request, now: float) -> Refusal | None: ...
    def abort(self, request_id: str, now: float) -> bool: ...
    def stop_sequence(self, request_id: str, index: int, now: float) -> bool: ...
    def plan(self, now: float) -> StepPlan: ...
    def list_guides(self, plan: StepPlan) -> Sequence[tuple[int, Guide]]: ...
    def update(self, plan: StepPlan, result: StepResult, now: float) -> StepOutput: ...
    def fail(self, plan: StepPlan, message: str, now: float) -> StepOutput: ...
    def has_work(self) -> bool: ...
    def learn_speed(self, prefill_tokens_per_second: float | None) -> None: ...
    def counts(self) -> SchedulerCounts: ...
    def reset_prefix_cache(self) -> tuple[CacheEvent, ...]: ...
    def check_integrity(self) -> None: ...


class Masker(Protocol):
    """Knows which tokens guides allow: of the package that made them."""

    def make_masks(self, guides: Sequence[tuple[int, Guide]]) -> TokenMasks:
        """One mask for each (row, guide); a guide that cannot go on is marked as failed and allows nothing."""
        ...


@dataclass(frozen=True, slots=True)
class StepReport:
    """One finished step, with where its time went (seconds)."""

    plan: StepPlan
    result: StepResult | None
    """Absent when the step failed or computed nothing."""
    output: StepOutput
    planned_at: float
    finished_at: float
    plan_seconds: float
    launch_seconds: float
    """Masks and the choice under them included."""
    wait_seconds: float
    update_seconds: float
    failure: str | None = None


@dataclass(slots=True)
class _Flight:
    """A launched step that has not been read."""

    plan: StepPlan
    pending: PendingStep | None
    planned_at: float
    plan_seconds: float
    launch_seconds: float
    failure: str | None = None


class Engine:
    """Scheduler and runner joined. One thread owns it."""

    def __init__(
        self,
        scheduler: SchedulerFace,
        runner: Runner,
        *,
        overlap: bool = False,
        masker: Masker | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._overlap = overlap
        self._masker = masker
        self._clock = clock
        self._flight: _Flight | None = None

    def add(self, request: Request) -> Refusal | None:
        """Queue a request, or say why it can never run."""
        return self.scheduler.add(request, self._clock())

    def abort(self, request_id: str) -> bool:
        """Free everything of a request; False when it is not known (any more)."""
        return self.scheduler.abort(request_id, self._clock())

    def stop_sequence(self, request_id: str, index: int) -> bool:
        """End one choice of a request; False when it is not running."""
        return self.scheduler.stop_sequence(request_id, index, self._clock())

    def has_work(self) -> bool:
        """A call of `step` would do something."""
        return self._flight is not None or self.scheduler.has_work()

    def step(self) -> StepReport | None:
        """Run one step, or with overlap start one and finish the one before.

        Returns None when overlap has only filled the pipe.
        """
        if self._flight is not None and self._flight.failure is not None:
            lost, self._flight = self._flight, None  # nothing may be planned on tokens that never came
            return self._finish(lost)
        flight = self._launch() if self.scheduler.has_work() else None
        if not self._overlap:
            return self._finish(self._choose(flight)) if flight else None
        previous, self._flight = self._flight, flight
        report = None if previous is None else self._finish(previous)
        if flight is not None:
            self._choose(flight)
        if report is not None:
            return report
        if flight is not None and flight.pending is None:  # nothing runs: there is nothing to overlap with
            self._flight = None
            return self._finish(flight)
        return None

    def check(self) -> None:
        """Raise when a part of the runner ended by itself, though no step runs."""
        self.runner.check()

    def close(self) -> None:
        """Release the runner. Idempotent."""
        self.runner.close()

    def _launch(self) -> _Flight:
        started = self._clock()
        plan = self.scheduler.plan(started)
        planned = self._clock()
        pending: PendingStep | None = None
        failure = None
        if plan.rows or plan.swap_out or plan.swap_in or plan.copies or plan.dropped_rows or plan.new_rows:
            try:
                pending = self.runner.launch(plan)
            except RunnerError as error:
                failure = str(error)
        return _Flight(plan, pending, started, planned - started, self._clock() - planned, failure)

    def _choose(self, flight: _Flight) -> _Flight:
        """Give a launched step the masks it waits for, all steps before it being read."""
        if not flight.plan.constrained or flight.pending is None:
            return flight
        started = self._clock()
        guides = self.scheduler.list_guides(flight.plan)
        assert self._masker is not None, "a request with a grammar needs who knows its masks"
        try:
            flight.pending.choose(self._masker.make_masks(guides))
        except RunnerError as error:
            flight.failure = str(error)
        flight.launch_seconds += self._clock() - started
        return flight

    def _finish(self, flight: _Flight) -> StepReport:
        started = self._clock()
        result = None
        if flight.pending is not None and flight.failure is None:
            try:
                result = flight.pending.result()
            except RunnerError as error:
                flight.failure = str(error)
        waited = self._clock()
        if flight.failure is not None:
            output = self.scheduler.fail(flight.plan, flight.failure, waited)
        else:
            empty = StepResult(flight.plan.step, (), 0.0)
            output = self.scheduler.update(flight.plan, result or empty, waited)
        finished = self._clock()
        return StepReport(
            plan=flight.plan,
            result=result,
            output=output,
            planned_at=flight.planned_at,
            finished_at=finished,
            plan_seconds=flight.plan_seconds,
            launch_seconds=flight.launch_seconds,
            wait_seconds=waited - started,
            update_seconds=finished - waited,
            failure=flight.failure,
        )


def make_epoch() -> str:
    """Random 64-bit number of this start, 16 hex digits."""
    return secrets.token_hex(8)
