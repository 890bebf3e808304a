"""The engine thread: takes messages, steps, hands out tokens. Everything of the engine is touched by it alone.

Errors:
    A failed step ends its requests with an error and the loop goes on (the engine turns it into outputs).
    Any other exception is a defect of ours: every stream ends with an error, the phase becomes Failed and
    the process is expected to end, since state may be corrupt.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Literal, TypeVar

import structlog

from millpond_common.contract.openai import ErrorCode
from millpond_engine.engine.speeds import SpeedMeter, make_sample
from millpond_engine.engine.step import Engine, StepReport
from millpond_engine.loop.courier import Courier
from millpond_engine.loop.ledger import LiveRequest
from millpond_engine.loop.mailbox import Call, Close, Mailbox, MailboxClosedError, Message, StopChoice, Submit
from millpond_engine.loop.recorder import Recorder
from millpond_engine.loop.settings import EventSink, LoadCancelledError, LoopSettings
from millpond_engine.loop.snapshot import EMPTY_COUNTS, LoopHealth, LoopPhase, LoopSnapshot
from millpond_engine.loop.stream import Delivery, EndKind, RequestStream, StreamEnd
from millpond_engine.records.outputs import CacheCleared, CacheEvent
from millpond_engine.records.request import Request

T = TypeVar("T")
log = structlog.get_logger(__name__)

PauseMode = Literal["abort", "wait", "keep"]


class EngineThread:
    """Runs one engine. Public methods may be called from any thread unless they say otherwise."""

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        recorder: Recorder,
        *,
        settings: LoopSettings | None = None,
        events: EventSink | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings or LoopSettings()
        self.recorder = recorder
        self._make_engine = make_engine
        self._events = events
        self._clock = clock
        self._mailbox = Mailbox(max_submissions=self.settings.max_open_requests)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._speeds = SpeedMeter()
        self._courier = Courier(recorder, abort=self._abort_slow)
        self._engine: Engine | None = None
        self._pause: PauseMode | None = None
        self._held: list[Submit] = []
        self._stopping = False
        self._started_at = self._beat_at = self._published_at = clock()
        self._ready_at: float | None = None
        self._load_seconds: float | None = None
        self._num_steps = 0
        self._progress = True
        self._phase = LoopPhase.LOADING
        self._failure = ""
        self._snapshot = LoopSnapshot(at=self._beat_at, phase=LoopPhase.LOADING)
        self.on_failure: Callable[[str], None] | None = None
        """Called once by the engine thread when it dies."""

    # -- for other threads

    def start(self) -> None:
        """Start loading, then serving."""
        self._thread.start()

    def submit(self, request: Request, stream: RequestStream, *, received_at: float) -> None:
        """Queue a request.

        Raises:
            MailboxFullError: when too many wait to be taken.
            MailboxClosedError: the thread has ended.
        """
        self._mailbox.put(Submit(request, stream, received_at))

    def close(self, request_id: str, outcome: str, refusal_code: str = "") -> None:
        """Say that a request's handler is done; aborts it when it still runs. Exactly once per submission."""
        with suppress(MailboxClosedError):  # nothing is left to free or to count
            self._mailbox.put(Close(request_id, outcome, refusal_code))

    def stop_choice(self, request_id: str, index: int) -> None:
        """Say that one choice of a request has ended by its text."""
        with suppress(MailboxClosedError):
            self._mailbox.put(StopChoice(request_id, index))

    def call(self, function: Callable[[EngineThread], T]) -> Future[T]:
        """Run `function` on the engine thread between two steps; the future fails when the thread has ended."""
        future: Future[T] = Future()
        try:
            self._mailbox.put(Call(function, future))
        except MailboxClosedError as error:
            future.set_exception(error)
        return future

    def stop(self, *, timeout_seconds: float) -> bool:
        """End the thread after its current step; False when it did not end in time."""
        self._stopping = True
        self.call(lambda _: None)
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    @property
    def stopping(self) -> bool:
        """Somebody asked the thread to end; a loader gives up when it sees this."""
        return self._stopping

    @property
    def snapshot(self) -> LoopSnapshot:
        """The newest published snapshot."""
        return self._snapshot

    def check_health(self, now: float) -> LoopHealth:
        """Whether the loop lives and moves; load does not matter."""
        if self._phase in {LoopPhase.FAILED, LoopPhase.STOPPED}:
            return LoopHealth(False, f"the engine loop has ended: {self._failure or 'stopped'}")
        if self._phase is LoopPhase.LOADING:
            return LoopHealth(self._thread.is_alive(), "loading")
        silent = now - self._beat_at
        if silent > self.settings.stuck_seconds:
            return LoopHealth(False, f"the engine loop has not moved for {silent:.0f} s")
        if not self._thread.is_alive():
            return LoopHealth(False, "the engine thread is gone")
        return LoopHealth(True, "stepping")

    # -- on the engine thread, through `call`

    @property
    def engine(self) -> Engine:
        """The engine; only for functions run by `call`.

        Raises:
            RuntimeError: while it sleeps or loads.
        """
        if self._engine is None:
            raise RuntimeError("the engine is not loaded")
        return self._engine

    def end_requests(self, request_ids: Iterable[str] | None, end: StreamEnd) -> int:
        """Abort these live requests (None: all) and end their streams so; returns how many."""
        chosen = list(self.recorder.ledger.live) if request_ids is None else list(request_ids)
        now = self._clock()
        num_ended = 0
        for request_id in chosen:
            live = self.recorder.ledger.live.get(request_id)
            if live is None or live.ended:
                continue
            if self._engine is not None:
                self._engine.abort(request_id)
            self._courier.deliver(live, Delivery(live.request.request_id, now, end=end))
            num_ended += 1
        self._courier.wake()
        return num_ended

    def pause(self, mode: PauseMode) -> None:
        """Hold new requests; running ones are aborted, finished or frozen as `mode` says."""
        self._pause = mode
        if mode == "abort":
            self.end_requests(
                None, StreamEnd(EndKind.CANCELLED, "the engine was paused", ErrorCode.OVERLOADED)
            )
        self._set_phase(LoopPhase.PAUSED)

    def resume(self) -> None:
        """Take up what a pause held."""
        self._pause = None
        self._set_phase(LoopPhase.READY)
        held, self._held = self._held, []
        for submit in held:
            self._take_submit(submit)

    def sleep(self) -> None:
        """Give the model's memory back; running requests end."""
        self.end_requests(None, StreamEnd(EndKind.CANCELLED, "the engine was put to sleep", ErrorCode.ASLEEP))
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            self._publish_events((CacheCleared(),))
        self._set_phase(LoopPhase.ASLEEP)

    def wake(self) -> None:
        """Load the model again after `sleep`."""
        if self._engine is not None:
            return
        try:
            self._load()
        except Exception:
            self._set_phase(LoopPhase.ASLEEP)
            raise

    def reset_prefix_cache(self) -> bool:
        """Drop the cached blocks; False while requests hold some."""
        counts = self.engine.scheduler.counts()
        if counts.num_running:
            return False
        self._publish_events(self.engine.scheduler.reset_prefix_cache())
        return True

    # -- the thread

    def _run(self) -> None:
        try:
            self._load()
            while not self._stopping:
                self._turn()
            self._leave("the engine is shutting down", LoopPhase.STOPPED)
        except LoadCancelledError as error:
            self._leave(str(error), LoopPhase.STOPPED)
        except Exception as error:
            log.exception("the engine loop ended", error_type=type(error).__name__)
            self._leave(f"{type(error).__name__}: {error}", LoopPhase.FAILED)
            if self.on_failure:
                self.on_failure(self._failure)

    def _load(self) -> None:
        started = self._clock()
        self._set_phase(LoopPhase.LOADING)
        self._engine = self._make_engine()
        self.recorder.ledger.forget_rows()
        self.recorder.bytes_per_block = self._engine.runner.info.bytes_per_block
        now = self._clock()
        if self._load_seconds is None:
            self._load_seconds = now - self._started_at
            self._ready_at = now
        self._beat_at = now
        self._set_phase(LoopPhase.READY)
        log.info("engine ready", seconds=round(now - started, 3))

    def _turn(self) -> None:
        """One round: messages, at most one step, news, snapshot."""
        wait = 0.0
        if not self._may_step():
            wait = self.settings.idle_wait_seconds
        elif not self._progress:
            wait = self.settings.no_progress_wait_seconds
        for message in self._mailbox.take(wait_seconds=wait):
            self._take(message)
        self._beat_at = self._clock()
        if self._engine is not None:
            self._engine.check()
        if self._may_step():
            report = self.engine.step()
            self._num_steps += 1
            if report is not None:
                self._book(report)
        self._courier.wake()
        self._publish()

    def _may_step(self) -> bool:
        return self._engine is not None and self._pause != "keep" and self._engine.has_work()

    def _take(self, message: Message) -> None:
        if isinstance(message, Submit):
            self._take_submit(message)
        elif isinstance(message, Close):
            self._take_close(message)
        elif isinstance(message, StopChoice):
            if self._engine is not None:
                self._engine.stop_sequence(message.request_id, message.index)
        elif message.future.set_running_or_notify_cancel():
            self._run_call(message)

    def _run_call(self, call: Call) -> None:
        """Run a function for its caller; the snapshot shows its effect before the caller hears of it."""
        try:
            value = call.function(self)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            call.future.set_exception(error)
            return
        self._publish(force=True)
        call.future.set_result(value)

    def _take_submit(self, submit: Submit) -> None:
        request = submit.request
        labels = self.recorder.make_live_labels(request)
        live = LiveRequest(request, submit.stream, submit.received_at, *labels)
        self.recorder.ledger.open(live)
        if self._pause is not None:
            self._held.append(submit)
            return
        now = self._clock()
        if self._engine is None:
            end = StreamEnd(EndKind.CANCELLED, "the engine is not loaded", ErrorCode.ASLEEP)
            self._courier.deliver(live, Delivery(live.request.request_id, now, end=end))
            return
        refusal = self._engine.add(request)
        self._progress = True
        if refusal is not None:
            end = StreamEnd(EndKind.REFUSED, refusal.message, refusal=refusal)
            self._courier.deliver(live, Delivery(live.request.request_id, now, end=end))

    def _take_close(self, close: Close) -> None:
        live = self.recorder.ledger.close(close.request_id)
        if live is None:
            return
        if self._held:
            self._held = [h for h in self._held if h.request.request_id != close.request_id]
        if not live.ended and self._engine is not None:
            self._engine.abort(close.request_id)
            self._progress = True
        if close.outcome == "refused":
            code = close.refusal_code or ErrorCode.INVALID_VALUE.value
            self.recorder.refuse(live.request.class_name, live.request.tenant, code, live.refusal)
        else:
            self.recorder.finish(live, close.outcome, self._clock())

    def _book(self, report: StepReport) -> None:
        """Metrics and news of one step."""
        output = report.output
        self.recorder.add_step(report)
        if report.result is not None and report.plan.rows:
            self._speeds.add(make_sample(report.plan, report.result.seconds))
            self.engine.scheduler.learn_speed(self._speeds.prefill_tokens_per_second)
        for preempted in output.preemptions:
            self.recorder.note_preemption(preempted)
        if output.cache_events:
            self._publish_events(output.cache_events)
        self._progress = bool(report.plan.rows or output.finished_requests or output.refusals)
        self._courier.hand_out(report)

    def _abort_slow(self, request_id: str) -> None:
        if self._engine is not None:
            self._engine.abort(request_id)

    def _publish_events(self, events: tuple[CacheEvent, ...]) -> None:
        for event in events:
            self.recorder.note_cache_event(event)
        if self._events is not None:
            self._events.publish(events)

    def _set_phase(self, phase: LoopPhase) -> None:
        self._phase = phase
        self._publish(force=True)

    def _publish(self, *, force: bool = False) -> None:
        now = self._clock()
        idle = not self._may_step()
        if not force and not idle and now - self._published_at < self.settings.publish_seconds:
            return
        self.recorder.note_residency(self._snapshot.counts.owners, now - self._published_at)
        self._published_at = now
        engine = self._engine
        self._snapshot = LoopSnapshot(
            at=now,
            phase=self._phase,
            counts=engine.scheduler.counts() if engine else EMPTY_COUNTS,
            info=engine.runner.info if engine else self._snapshot.info,
            prefill_tokens_per_second=self._speeds.prefill_tokens_per_second,
            decode_tokens_per_second=self._speeds.decode_tokens_per_second,
            decode_seconds_per_step=self._speeds.decode_seconds_per_step,
            load_seconds=self._load_seconds,
            ready_at=self._ready_at,
            charged_seconds=self.recorder.charged_seconds,
            num_open=len(self.recorder.ledger.live),
            num_steps=self._num_steps,
            failure=self._failure,
        )

    def _leave(self, message: str, phase: LoopPhase) -> None:
        """End every stream and the engine; the thread returns after this.

        The phase changes first, so that whoever sees a stream end sees why; the scheduler may be corrupt
        and is not asked for anything any more.
        """
        self._failure, self._phase = message, phase
        self._snapshot = replace(self._snapshot, phase=phase, failure=message)
        now = self._clock()
        for message_left in self._mailbox.close():
            if isinstance(message_left, Submit):
                labels = self.recorder.make_live_labels(message_left.request)
                live = LiveRequest(message_left.request, message_left.stream, now, *labels)
                self.recorder.ledger.open(live)
            elif isinstance(message_left, Call):
                message_left.future.set_exception(MailboxClosedError("the engine loop has ended"))
        failed = phase is LoopPhase.FAILED
        public = "the engine failed" if failed else message
        code = ErrorCode.ENGINE_ERROR if failed else ErrorCode.DRAINING
        for live in self.recorder.ledger.live.values():
            self._courier.deliver(
                live, Delivery(live.request.request_id, now, end=StreamEnd(EndKind.FAILED, public, code))
            )
        self._courier.wake()
        if self._engine is not None:
            self._engine.close()
