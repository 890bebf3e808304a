"""The book of live requests: who they are, when things happened to them, and what is booked when they end."""

from __future__ import annotations

from dataclasses import dataclass, field

from millpond_engine.loop.stream import RequestStream
from millpond_engine.records.outputs import PromptOutput, SequenceOutput
from millpond_engine.records.request import Refusal, Request


@dataclass(slots=True)
class LiveRequest:
    """One request between submission and close."""

    request: Request
    stream: RequestStream
    received_at: float
    class_label: str
    tenant_label: str
    scheduled_at: float | None = None
    """First step that computed something for it."""
    prompt_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    last_by_index: dict[int, float] = field(default_factory=dict)
    tokens_by_index: dict[int, int] = field(default_factory=dict)
    cached_tokens: int = 0
    first_start: int | None = None
    """Position of the first token computed for it: what came before was cached."""
    computed_end: int = 0
    """End of the part of the prompt that has been computed."""
    num_preemptions: int = 0
    ended: bool = False
    """Its stream has its last news; the handler has not closed it yet."""
    refusal: Refusal | None = None
    """Of the scheduler, when that was the last news."""

    @property
    def num_tokens(self) -> int:
        """Generated tokens of all sequences."""
        return sum(self.tokens_by_index.values())


@dataclass(frozen=True, slots=True)
class TokenNews:
    """What one sequence's new tokens mean for latency."""

    num_tokens: int
    first: bool
    """They hold the request's first token."""
    gap_seconds: float | None
    """Time since this sequence's token before; None for its first burst."""
    num_gaps: int
    """Tokens that share the gap in equal parts."""


class Ledger:
    """Live requests by id, and which row of the runner belongs to which of them."""

    def __init__(self) -> None:
        self.live: dict[str, LiveRequest] = {}
        self._rows: dict[int, LiveRequest] = {}

    def open(self, live: LiveRequest) -> None:
        """Book a submission."""
        self.live[live.request.request_id] = live

    def close(self, request_id: str) -> LiveRequest | None:
        """Take a request out of the book."""
        return self.live.pop(request_id, None)

    def assign_row(self, row: int, request_id: str, now: float) -> None:
        """A row belongs to a request from now on; its first row starts its service."""
        live = self.live.get(request_id)
        if live is None:
            self._rows.pop(row, None)
            return
        self._rows[row] = live
        if live.scheduled_at is None:
            live.scheduled_at = now

    def drop_row(self, row: int) -> None:
        """A row is free."""
        self._rows.pop(row, None)

    def forget_rows(self) -> None:
        """Another runner: its rows are numbered anew."""
        self._rows.clear()

    def find_row(self, row: int) -> LiveRequest | None:
        """The request a row belongs to, unless it has been closed."""
        return self._rows.get(row)


def note_prompt(live: LiveRequest, output: PromptOutput, now: float) -> None:
    """Book that the prompt is computed."""
    live.cached_tokens = output.cached_tokens
    live.prompt_at = now


def note_tokens(live: LiveRequest, output: SequenceOutput, now: float) -> TokenNews | None:
    """Book new tokens of one sequence; the end token, which is not among `tokens`, counts as generated."""
    num_tokens = len(output.tokens) + (1 if output.stop_token is not None else 0)
    if num_tokens == 0:
        return None
    first = live.first_token_at is None
    if first:
        live.first_token_at = now
    before = live.last_by_index.get(output.index)
    live.last_by_index[output.index] = live.last_token_at = now
    live.tokens_by_index[output.index] = live.tokens_by_index.get(output.index, 0) + num_tokens
    if before is None:
        return TokenNews(num_tokens, first, None, 0)
    return TokenNews(num_tokens, first, now - before, num_tokens)
