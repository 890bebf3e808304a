"""Brings the news of a step to the streams of its requests, one wake-up for all of them."""

from __future__ import annotations

from collections.abc import Callable

from millpond_common.contract.openai import ErrorCode
from millpond_engine.engine.step import StepReport
from millpond_engine.loop.ledger import LiveRequest
from millpond_engine.loop.recorder import Recorder
from millpond_engine.loop.stream import Delivery, EndKind, RequestStream, StreamEnd, wake_streams
from millpond_engine.records.outputs import SequenceOutput
from millpond_engine.records.request import FinishReason
from millpond_engine.records.step import RowFailure


class Courier:
    """Owned by the engine thread."""

    def __init__(self, recorder: Recorder, *, abort: Callable[[str], None]) -> None:
        self._recorder = recorder
        self._abort = abort
        self._to_wake: list[RequestStream] = []

    def hand_out(self, report: StepReport) -> None:
        """Book and deliver what a step brought to each request."""
        output, now = report.output, report.finished_at
        live_by_id = self._recorder.ledger.live
        prompts = {prompt.request_id: prompt for prompt in output.prompts}
        sequences: dict[str, list[SequenceOutput]] = {}
        for sequence in output.sequences:
            sequences.setdefault(sequence.request_id, []).append(sequence)
        ends = {
            refusal.request_id: StreamEnd(EndKind.REFUSED, refusal.message, refusal=refusal)
            for refusal in output.refusals
        }
        finished = set(output.finished_requests)
        for request_id in dict.fromkeys((*prompts, *sequences, *ends, *output.finished_requests)):
            live = live_by_id.get(request_id)
            if live is None or live.ended:
                continue
            prompt, news = prompts.get(request_id), tuple(sequences.get(request_id, ()))
            if prompt is not None:
                self._recorder.note_prompt(live, prompt, now)
            for sequence in news:
                self._recorder.note_tokens(live, sequence, now)
            end = ends.get(request_id) or _make_failure(news, report.failure)
            if end is None and request_id in finished:
                end = StreamEnd(EndKind.FINISHED)
            if end is not None and request_id not in finished:
                self._abort(request_id)  # one of its choices failed: no answer can be whole any more
            self.deliver(live, Delivery(request_id, now, prompt, news, end))

    def deliver(self, live: LiveRequest, delivery: Delivery) -> None:
        """Put news into a stream; nothing follows its end, and a reader too far behind gets one."""
        if live.ended:
            return
        kept_up = live.stream.put(delivery)
        self._to_wake.append(live.stream)
        if delivery.end is not None:
            live.ended, live.refusal = True, delivery.end.refusal
        elif not kept_up:
            self._abort(live.request.request_id)
            live.ended = True
            slow = StreamEnd(EndKind.CANCELLED, "the client reads too slowly")
            live.stream.put(Delivery(delivery.request_id, delivery.at, end=slow))

    def wake(self) -> None:
        """Wake the readers of all streams that got news since the last call."""
        if self._to_wake:
            wake_streams(self._to_wake)
            self._to_wake = []


def _make_failure(news: tuple[SequenceOutput, ...], failure: str | None) -> StreamEnd | None:
    """The end of a request one of whose sequences failed; None when none did."""
    if all(sequence.finish is not FinishReason.ERROR for sequence in news):
        return None
    own = next((sequence.message for sequence in news if sequence.message), "")
    callers = own in {RowFailure.NO_CHOICE, RowFailure.GRAMMAR} and not failure
    code = ErrorCode.INVALID_VALUE if callers else ErrorCode.ENGINE_ERROR
    return StreamEnd(EndKind.FAILED, failure or own or "a step of this request failed", code)
