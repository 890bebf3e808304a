"""The requests of one call, from submission to exactly one close each, whatever happens to the handler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from millpond_common.contract.openai import ErrorCode
from millpond_engine.loop.mailbox import MailboxClosedError, MailboxFullError
from millpond_engine.loop.stream import Delivery, EndKind, RequestStream, StreamEnd
from millpond_engine.loop.thread import EngineThread
from millpond_engine.records.request import Request
from millpond_engine.server.errors import RequestError, make_error, translate_refusal
from millpond_engine.server.lifecycle import Cuttable


class StreamEndedError(RequestError):
    """The engine ended a request; carries the outcome to book for it."""

    def __init__(self, cause: RequestError, *, request_id: str, outcome: str) -> None:
        super().__init__(cause.error)
        self.request_id = request_id
        self.outcome = outcome


class Generation:
    """News of several requests in one stream. Use as a context manager: leaving it closes what is open."""

    def __init__(
        self,
        thread: EngineThread,
        requests: Sequence[Request],
        *,
        received_at: float,
        max_unread_tokens: int,
        running: set[Cuttable] | None = None,
    ) -> None:
        self._thread = thread
        self._requests = requests
        self._received_at = received_at
        loop = asyncio.get_running_loop()
        self._stream = RequestStream(loop, max_unread_tokens=max_unread_tokens)
        self._open: dict[str, None] = {}
        self._running = running if running is not None else set()

    def __enter__(self) -> Self:
        try:
            for request in self._requests:
                self._thread.submit(request, self._stream, received_at=self._received_at)
                self._open[request.request_id] = None
        except MailboxFullError as error:
            self._close_all("refused", ErrorCode.OVERLOADED)
            raise make_error(ErrorCode.OVERLOADED, str(error)) from error
        except MailboxClosedError as error:
            raise make_error(
                ErrorCode.ENGINE_ERROR, "the engine has failed; this replica will restart"
            ) from error
        self._running.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, trace
        self._running.discard(self)
        if isinstance(error, StreamEndedError):
            self._close_one(error.request_id, error.outcome, error.error.code)
            self._close_all("cancelled")  # the call's other prompts are given up
        elif error is None or isinstance(error, (asyncio.CancelledError, ConnectionError, TimeoutError)):
            self._close_all("cancelled")
        else:
            self._close_all("error")

    def cut(self, end: StreamEnd) -> None:
        """End every open request with `end`, whether or not the engine thread still moves."""
        for request_id in self._open:
            self._stream.put(Delivery(request_id, self._received_at, end=end))
        self._stream.wake()

    def when_broken(self, call: Callable[[], None]) -> None:
        """Call this in the event loop when a request is ended early, also while its handler is busy."""
        self._stream.on_broken = call

    @property
    def open(self) -> bool:
        """Some request has not been closed."""
        return bool(self._open)

    async def get(self) -> Delivery:
        """Next news of any request.

        Raises:
            StreamEndedError: a request was refused, failed or was cancelled by somebody else.
        """
        delivery = await self._stream.get()
        end = delivery.end
        if end is not None and end.kind is not EndKind.FINISHED and delivery.request_id in self._open:
            raise _make_ended(delivery.request_id, end)
        return delivery

    def close(self, request_id: str, outcome: str) -> None:
        """One request is answered; what still runs of it is aborted."""
        self._close_one(request_id, outcome)

    def stop_choice(self, request_id: str, index: int) -> None:
        """One choice of an open request is answered; its sequence need not go on."""
        if request_id in self._open:
            self._thread.stop_choice(request_id, index)

    def _close_all(self, outcome: str, code: ErrorCode | None = None) -> None:
        for request_id in list(self._open):
            self._close_one(request_id, outcome, code)

    def _close_one(self, request_id: str, outcome: str, code: ErrorCode | None = None) -> None:
        if request_id in self._open:
            del self._open[request_id]
            self._thread.close(request_id, outcome, code.value if code else "")


def _make_ended(request_id: str, end: StreamEnd) -> StreamEndedError:
    if end.refusal is not None:
        return StreamEndedError(translate_refusal(end.refusal), request_id=request_id, outcome="refused")
    outcome = "cancelled" if end.kind is EndKind.CANCELLED else "error"
    if end.code is ErrorCode.INVALID_VALUE:  # only the choice of a token showed that the request excludes all
        outcome = "refused"
    return StreamEndedError(make_error(end.code, end.message), request_id=request_id, outcome=outcome)
