"""What one request's handler reads: news from the engine thread, in order, bounded, never blocking the step.

The engine thread appends under a lock and marks the stream; one wake-up per step reaches the event loop
for all streams together.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from millpond_common.contract.openai import ErrorCode
from millpond_engine.records.outputs import PromptOutput, SequenceOutput
from millpond_engine.records.request import Refusal


class EndKind(StrEnum):
    """How a stream of news ends."""

    FINISHED = "finished"
    REFUSED = "refused"
    FAILED = "failed"
    """The step or the engine failed."""
    CANCELLED = "cancelled"
    """Somebody asked for its end: an operator, or a client that does not read."""


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """The last news of a request."""

    kind: EndKind
    message: str = ""
    code: ErrorCode = ErrorCode.ENGINE_ERROR
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Delivery:
    """News of one request from one step."""

    request_id: str
    at: float
    """Monotonic time the step was finished."""
    prompt: PromptOutput | None = None
    sequences: tuple[SequenceOutput, ...] = ()
    end: StreamEnd | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(len(sequence.tokens) for sequence in self.sequences)


class RequestStream:
    """News of one caller's requests between the engine thread and one task of the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, max_unread_tokens: int) -> None:
        self._loop = loop
        self._max_unread_tokens = max_unread_tokens
        self._lock = threading.Lock()
        self._items: deque[Delivery] = deque()
        self._num_unread = 0
        self._ready = asyncio.Event()
        self._broken = False
        self.on_broken: Callable[[], None] | None = None
        """Called in the event loop when news has come that ends a request early: nobody should wait any longer."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop whose task reads this stream."""
        return self._loop

    def put(self, delivery: Delivery) -> bool:
        """Append; False when the reader is further behind than the bound (the news is kept all the same)."""
        with self._lock:
            self._items.append(delivery)
            self._num_unread += delivery.num_tokens
            self._broken |= delivery.end is not None and delivery.end.kind is not EndKind.FINISHED
            return self._num_unread <= self._max_unread_tokens

    def wake(self) -> None:
        """Let the reader look; called in the event loop."""
        self._ready.set()
        if self._broken and self.on_broken is not None:
            self.on_broken()

    async def get(self) -> Delivery:
        """Next news, waiting for it."""
        while True:
            with self._lock:
                if self._items:
                    delivery = self._items.popleft()
                    self._num_unread -= delivery.num_tokens
                    return delivery
                self._ready.clear()
            await self._ready.wait()


def wake_streams(streams: list[RequestStream]) -> None:
    """Wake many readers with one call per event loop; from any thread."""
    by_loop: dict[asyncio.AbstractEventLoop, list[RequestStream]] = {}
    for stream in streams:
        by_loop.setdefault(stream.loop, []).append(stream)
    for loop, group in by_loop.items():
        if not loop.is_closed():
            loop.call_soon_threadsafe(_wake_all, group)


def _wake_all(streams: list[RequestStream]) -> None:
    for stream in streams:
        stream.wake()
