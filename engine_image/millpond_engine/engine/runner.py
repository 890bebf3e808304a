"""The seam between engine and model: record in, record out. Torch lives behind it, the fake runner beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from millpond_engine.records.capacity import Capacity
from millpond_engine.records.grammar import TokenMasks
from millpond_engine.records.step import StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerInfo(Capacity):
    """Facts of a loaded model: what the scheduler may spend, and the words of the start-up line."""

    model: str
    """Architecture and size."""
    dtype: str
    device: str
    limited_by: str
    """What bounds the number of blocks, with numbers."""


class PendingStep(Protocol):
    """A launched step."""

    def choose(self, masks: TokenMasks) -> None:
        """Choose the tokens; called once, for a plan with constrained rows only, after every step before it was read.

        A row without a mask chooses freely.

        Raises:
            RunnerError: the step failed and its rows are lost; the engine may go on.
        """
        ...

    def result(self) -> StepResult:
        """Wait for the step and return its result."""
        ...


class Runner(Protocol):
    """Executes plans in order. Not thread-safe: one thread owns it."""

    @property
    def info(self) -> RunnerInfo:
        """Facts fixed at load time."""
        ...

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start a step; work may continue on a device until `result` is called.

        With constrained rows in the plan, tokens are chosen by `choose`.

        Raises:
            RunnerError: the step failed and its rows are lost; the engine may go on.
        """
        ...

    def check(self) -> None:
        """Called between steps: raise when a part of the runner ended by itself. Ends the engine."""
        ...

    def close(self) -> None:
        """Release memory and processes. Idempotent."""
        ...


class RunnerError(RuntimeError):
    """A step failed as a whole; the message is free of prompt text."""
