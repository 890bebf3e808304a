"""What a step costs in seconds, and which steps go wrong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from millpond_engine.records.step import StepPlan


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step = a constant, plus prompt tokens over a speed, plus a little per decoding row.

    All zeros is a replica that answers as fast as the loop can go.
    """

    prefill_tokens_per_second: float = 0.0
    """0: prompts cost nothing."""
    decode_step_seconds: float = 0.0
    """Constant part of every step that computes something."""
    decode_row_seconds: float = 0.0
    """Added per row that decodes."""
    load_seconds: float = 0.0

    def compute_step_seconds(self, plan: StepPlan) -> float:
        """Time the plan takes on this replica."""
        if not plan.rows:
            return 0.0
        num_decodes = sum(1 for row in plan.rows if row.num_tokens == 1)
        prompt_tokens = sum(row.num_tokens for row in plan.rows if row.num_tokens > 1)
        seconds = self.decode_step_seconds + num_decodes * self.decode_row_seconds
        if self.prefill_tokens_per_second > 0:
            seconds += prompt_tokens / self.prefill_tokens_per_second
        return seconds


@dataclass(frozen=True, slots=True)
class Faults:
    """Failures on purpose; steps count from 1 in the order they are launched."""

    failing_steps: frozenset[int] = frozenset()
    """The step raises RunnerError: its rows are lost, the engine goes on."""
    crashing_steps: frozenset[int] = frozenset()
    """The step raises AssertionError: a defect of ours, the engine must end."""
    stalling_steps: frozenset[int] = frozenset()
    """The step takes `stall_seconds` longer."""
    stall_seconds: float = 0.0
    load_message: str = ""
    """Not empty: loading fails with this message."""


def make_faults(
    *,
    failing: Iterable[int] = (),
    crashing: Iterable[int] = (),
    stalling: Iterable[int] = (),
    stall_seconds: float = 0.0,
    load_message: str = "",
) -> Faults:
    """Faults from the flags of the command line."""
    return Faults(frozenset(failing), frozenset(crashing), frozenset(stalling), stall_seconds, load_message)
