"""Messages from the server to the engine thread, bounded, and the thread's way to sleep until one comes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from millpond_engine.loop.stream import RequestStream
from millpond_engine.records.request import Request

if TYPE_CHECKING:
    from millpond_engine.loop.thread import EngineThread


@dataclass(frozen=True, slots=True)
class Submit:
    """Queue a request; its news go to `stream`."""

    request: Request
    stream: RequestStream
    received_at: float
    """Monotonic time the request was read: where time to first token starts."""


@dataclass(frozen=True, slots=True)
class Close:
    """The handler is done with a request: abort it if it still runs, and book its outcome."""

    request_id: str
    outcome: str
    refusal_code: str = ""
    """Error code, with the outcome `refused`."""


@dataclass(frozen=True, slots=True)
class Call:
    """Run a function on the engine thread between two steps."""

    function: Callable[[EngineThread], Any]
    future: Future[Any]


@dataclass(frozen=True, slots=True)
class StopChoice:
    """One choice has ended by its text; the others of the request go on."""

    request_id: str
    index: int


Message = Submit | Close | StopChoice | Call


class MailboxFullError(RuntimeError):
    """More submissions than the bound wait for the engine thread."""


class MailboxClosedError(RuntimeError):
    """The engine thread has ended and takes no messages any more."""


class Mailbox:
    """Unbounded for closes and calls, which free things; bounded for submissions."""

    def __init__(self, *, max_submissions: int) -> None:
        self._max_submissions = max_submissions
        self._condition = threading.Condition()
        self._messages: deque[Message] = deque()
        self._num_submissions = 0
        self._closed = False

    def put(self, message: Message) -> None:
        """Hand a message to the engine thread; from any thread.

        Raises:
            MailboxFullError: a submission beyond the bound.
            MailboxClosedError: nobody will take it.
        """
        with self._condition:
            if self._closed:
                raise MailboxClosedError("the engine loop has ended")
            if isinstance(message, Submit):
                if self._num_submissions >= self._max_submissions:
                    raise MailboxFullError("the engine has not taken its newest requests yet")
                self._num_submissions += 1
            self._messages.append(message)
            self._condition.notify()

    def take(self, *, wait_seconds: float) -> list[Message]:
        """All messages, after waiting at most `wait_seconds` for the first one."""
        with self._condition:
            if not self._messages and wait_seconds > 0:
                self._condition.wait(wait_seconds)
            messages = list(self._messages)
            self._messages.clear()
            self._num_submissions = 0
            return messages

    def close(self) -> list[Message]:
        """Refuse messages from now on; returns those nobody has taken."""
        with self._condition:
            self._closed = True
        return self.take(wait_seconds=0)
