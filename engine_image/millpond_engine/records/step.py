"""What passes between scheduler and runner: one plan in, one result out, plain records.

The runner keeps one row of state per sequence (tokens, sampling parameters, block table), so a
plan carries only what is new since the row's last step. The records made for each row of each step
are frozen msgspec structs: making a frozen dataclass takes fifteen times as long.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from millpond_engine.records.request import SamplingParams


@dataclass(frozen=True, slots=True)
class NewRow:
    """A sequence the runner has not seen, or sees again after preemption by recompute, or forked from another row."""

    row: int
    sampling: SamplingParams
    seed: int
    """Of this sequence; with the position it fixes every random draw."""
    tokens: tuple[int, ...]
    """Every token known so far: prompt, then generated ones."""
    prompt_tokens: int
    """How many of them are the prompt (penalties tell prompt from output)."""
    block_table: tuple[int, ...]
    stop_token_ids: tuple[int, ...] = ()
    """Ends of sequence, banned while fewer than `min_tokens` are generated."""
    min_tokens: int = 0
    adapter: str = ""
    constrained: bool = False
    """Its tokens come from masks: a step that samples it waits for them."""
    request_id: str = ""
    """Whose sequence it is: time to schedule and device time are charged by it. The runner does not read it."""


class RowStep(msgspec.Struct, frozen=True, gc=False):
    """Work of one sequence in one step: compute tokens [start, start + num_tokens) of the row.

    Their KV goes to the slots that the block table gives for those positions. With `sample`, the
    last position's logits choose the next token. A decode whose token was sampled in a step that
    has not been read back yet names it all the same: the runner has it in the row.
    """

    row: int
    start: int
    num_tokens: int
    new_blocks: tuple[int, ...] = ()
    """Appended to the row's block table before the step."""
    sample: bool = True
    prompt_logprobs: bool = False
    """Report log-probabilities of the prompt tokens computed here."""
    num_branches: int = 0
    """Beam search: report this many most likely next tokens instead of sampling; `sample` is set too."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one block's KV of all layers on the device, before the forward pass (copy-on-write)."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class BlockMove:
    """Copy one block between device and host memory (swap), before the forward pass."""

    device: int
    host: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One engine step. Order of execution: drop rows, swap out, swap in, new rows, tables, copies, forward, sample.

    `rows` holds decodes first. An empty plan (`rows == ()`) may still carry moves and drops.
    """

    step: int
    rows: tuple[RowStep, ...]
    new_rows: tuple[NewRow, ...] = ()
    dropped_rows: tuple[int, ...] = ()
    replaced_tables: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(row, whole block table) where blocks were exchanged: copy-on-write, duplicates given back, swap in."""
    appended_tokens: tuple[tuple[int, int], ...] = ()
    """(row, token) chosen by the scheduler, not by the runner: beam search."""
    copies: tuple[BlockCopy, ...] = ()
    swap_out: tuple[BlockMove, ...] = ()
    swap_in: tuple[BlockMove, ...] = ()
    constrained: tuple[int, ...] = ()
    """Rows that sample under a grammar: the forward pass may start, the choice of tokens waits for their masks."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(row.num_tokens for row in self.rows)


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probability of one chosen token and of the most likely alternatives, from the raw distribution."""

    logprob: float
    rank: int
    """1 is the most likely token."""
    top: tuple[tuple[int, float], ...] = ()


class RowResult(msgspec.Struct, frozen=True, gc=False):
    """What one sequence got from the step, for rows with `sample`, branches or prompt log-probabilities."""

    row: int
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    branches: tuple[tuple[int, float], ...] = ()
    """Beam search: (token, log-probability), most likely first."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """For positions start + 1 .. start + num_tokens that lie inside the prompt."""


class RowFailure(StrEnum):
    """Why a row failed alone; the values are what the client reads, free of prompt text."""

    NOT_NUMBERS = "the model produced values that are not numbers"
    NO_CHOICE = (
        "no token is left to choose: allowed_token_ids, bad_words, logit_bias, min_tokens and the grammar, where there is "
        "one, exclude them all"
    )
    """The caller's fault: the request excludes every token."""
    GRAMMAR = (
        "the grammar needs more work for one token than this engine does: bound its repetitions, make its patterns "
        "shorter or give it fewer optional parts"
    )
    """The caller's fault: only its use showed it."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of a plan."""

    step: int
    rows: tuple[RowResult, ...]
    seconds: float
    """Time the runner took, for measured speeds."""
    failed_rows: dict[int, str] = field(default_factory=dict)
    """Rows whose step failed alone, with a message free of prompt text (`RowFailure` where one fits)."""
