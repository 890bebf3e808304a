"""The seam between engine and model: record in, record out. Torch lives behind it, the fake runner beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from millpond_engine.core.step import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What the loaded model and its memory allow."""

    model: str
    """Architecture and size in words, for the start-up line."""
    vocabulary_size: int
    max_model_tokens: int
    """Longest sequence: the smaller of the model's and the configured one."""
    block_tokens: int
    num_blocks: int
    """Usable device blocks; ids are 0 .. num_blocks - 1."""
    num_host_blocks: int
    bytes_per_block: int
    dtype: str
    device: str
    eos_token_ids: tuple[int, ...]
    limited_by: str
    """What bounds the number of blocks, in words with numbers."""
    copy_bytes_per_second: float
    """Measured device to host bandwidth."""


class PendingStep(Protocol):
    """A launched step."""

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

        Raises:
            RunnerError: the step failed and its rows are lost; the engine may go on.
        """
        ...

    def close(self) -> None:
        """Release memory and processes. Idempotent."""
        ...


class RunnerError(RuntimeError):
    """A step failed as a whole; the message is free of prompt text."""
