"""What the process is doing as clients see it: loading, ready, draining, asleep; and the drain itself."""

from __future__ import annotations

import asyncio
import time
from typing import Literal, Protocol

import structlog

from millpond_common.contract.openai import ErrorCode
from millpond_engine.loop.snapshot import LoopPhase
from millpond_engine.loop.stream import EndKind, StreamEnd
from millpond_engine.loop.thread import EngineThread
from millpond_engine.server.errors import RequestError, make_error

log = structlog.get_logger(__name__)

PublicPhase = Literal["Loading", "Ready", "Draining", "Asleep", "Failed"]
_GRACE_SECONDS = 2.0
"""After the drain deadline: time for error events to leave."""


class Cuttable(Protocol):
    """A running call that can be ended from here."""

    def cut(self, end: StreamEnd) -> None:
        """End it with an error."""
        ...


class Lifecycle:
    """Counts open requests, refuses new ones when it must, drains. Owned by the event loop."""

    def __init__(self, thread: EngineThread, *, drain_seconds: float, max_open_requests: int) -> None:
        self._thread = thread
        self._drain_seconds = drain_seconds
        self._max_open = max_open_requests
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._drain: asyncio.Task[None] | None = None
        self.drained = asyncio.Event()
        self.running: set[Cuttable] = set()
        """Calls in generation: what the drain deadline cuts."""

    @property
    def open_requests(self) -> int:
        """Requests whose response has not ended."""
        return self._open

    @property
    def draining(self) -> bool:
        """New requests are refused for good."""
        return self._drain is not None

    @property
    def phase(self) -> PublicPhase:
        """One word for /v1/state."""
        phase = self._thread.snapshot.phase
        if phase in {LoopPhase.FAILED, LoopPhase.STOPPED} and not self.draining:
            return "Failed"
        if self.draining:
            return "Draining"
        if phase is LoopPhase.ASLEEP:
            return "Asleep"
        return "Loading" if phase is LoopPhase.LOADING else "Ready"

    @property
    def ready(self) -> bool:
        """Whether a new request would be served now."""
        return not self.draining and self._thread.snapshot.phase is LoopPhase.READY

    def open(self) -> None:
        """Count a new request in.

        Raises:
            RequestError: when it cannot be served now.
        """
        refusal = self._refuse()
        if refusal is not None:
            raise refusal
        self._open += 1
        self._idle.clear()

    def close(self) -> None:
        """Count a request out, once per `open`."""
        self._open -= 1
        if self._open == 0:
            self._idle.set()

    def start_drain(self) -> None:
        """Refuse new requests from now on, and let the open ones finish until the deadline. Idempotent."""
        if self._drain is None:
            log.info("draining", open_requests=self._open, drain_seconds=self._drain_seconds)
            self._drain = asyncio.get_running_loop().create_task(self._run_drain())

    def _refuse(self) -> RequestError | None:
        phase = self._thread.snapshot.phase
        if self.draining:
            return make_error(ErrorCode.DRAINING, "this replica is draining; send the request to another one")
        if phase is LoopPhase.LOADING:
            return make_error(ErrorCode.OVERLOADED, "the model is still loading", retry=5)
        if phase is LoopPhase.ASLEEP:
            return make_error(ErrorCode.ASLEEP, "this replica is asleep; wake it up first")
        if phase in {LoopPhase.FAILED, LoopPhase.STOPPED}:
            return make_error(ErrorCode.ENGINE_ERROR, "the engine has failed; this replica will restart")
        if self._open >= self._max_open:
            message = f"{self._open} requests are open, which is the limit of this replica"
            return make_error(ErrorCode.OVERLOADED, message)
        return None

    async def _run_drain(self) -> None:
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._drain_seconds):
                await self._idle.wait()
        except TimeoutError:
            await self._cut_streams()
        log.info("drained", seconds=round(time.monotonic() - started, 3), open_requests=self._open)
        self.drained.set()

    async def _cut_streams(self) -> None:
        end = StreamEnd(
            EndKind.FAILED, "the replica is shutting down and its drain time is over", ErrorCode.DRAINING
        )
        log.warning("drain deadline passed", open_requests=self._open)
        for call in list(self.running):
            call.cut(end)
        try:
            async with asyncio.timeout(_GRACE_SECONDS):
                await self._idle.wait()
        except TimeoutError:
            log.warning("requests left behind", open_requests=self._open)
