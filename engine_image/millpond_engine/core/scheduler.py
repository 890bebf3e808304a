"""The scheduler's face: requests in, plans out, results in, news out. Pure: time is a parameter.

plan(n + 1) may be called before update(n), at most one step ahead. Results of sequences that ended
in between are dropped, and blocks that a step in flight may touch are freed when it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from millpond_engine.core.counts import make_counts
from millpond_engine.core.groups import end_sequence
from millpond_engine.core.integrity import check_state
from millpond_engine.core.limits import check_request
from millpond_engine.core.planner import make_plan
from millpond_engine.core.state import State
from millpond_engine.core.update import apply_failure, apply_result, list_guides
from millpond_engine.records.capacity import Capacity
from millpond_engine.records.grammar import Guide
from millpond_engine.records.outputs import CacheEvent, SchedulerCounts, StepOutput
from millpond_engine.records.request import FinishReason, Refusal, RefusalReason, Request
from millpond_engine.records.settings import SchedulerSettings
from millpond_engine.records.step import StepPlan, StepResult


class Scheduler:
    """Iteration-level scheduler over a paged, prefix-shared KV cache (Orca, OSDI'22; vLLM, SOSP'23)."""

    def __init__(self, settings: SchedulerSettings, capacity: Capacity) -> None:
        self._state = State(settings, capacity)

    def add(self, request: Request, now: float) -> Refusal | None:
        """Queue a request, or say at once why it can never run or why the queue is full."""
        state = self._state
        if request.request_id in state.groups:
            message = f"a request with id {request.request_id} is open"
            return Refusal(request.request_id, RefusalReason.INVALID_VALUE, message)
        rule = state.get_class(request.class_name)
        refusal = check_request(request, rule, state.settings, state.capacity) or self._check_queue(request)
        if refusal is not None:
            return refusal
        group = state.make_group(request)
        state.groups[request.request_id] = group
        state.enqueue(group, now)
        return None

    def abort(self, request_id: str, now: float) -> bool:
        """Drop a request wherever it is; False when it is not known (any more).

        Its blocks are free at once, or when the step in flight that may touch them has ended. The
        caller reports the outcome: no output mentions the request again.
        """
        del now
        group = self._state.groups.get(request_id)
        if group is None:
            return False
        self._state.forget(group, FinishReason.CANCELLED)
        return True

    def stop_sequence(self, request_id: str, index: int, now: float) -> bool:
        """End one choice early, as after a stop string; the request's other choices go on.

        Returns False when that choice is not running or waiting. If it was the last one, the next
        output lists the request as finished.
        """
        del now
        group = self._state.groups.get(request_id)
        if group is None or group.held:
            return False
        for sequence in [*group.running, *group.waiting]:
            if sequence.index == index:
                end_sequence(self._state, sequence, FinishReason.STOP)
                return True
        return False

    def plan(self, now: float) -> StepPlan:
        """Decide the next step; it may be empty."""
        assert len(self._state.flights) <= 1, "a step may be planned at most one ahead of the last one read"
        return make_plan(self._state, now)

    def list_guides(self, plan: StepPlan) -> Sequence[tuple[int, Guide]]:
        """Guides of the plan's constrained rows, for their masks; ask when all steps before it have been read.

        Rows whose sequence ended meanwhile are left out: nobody reads what they choose.
        """
        return list_guides(self._state, plan)

    def update(self, plan: StepPlan, result: StepResult, now: float) -> StepOutput:
        """Take in a step's result and report all that happened since the last report."""
        apply_result(self._state, plan, result, now)
        return self._state.take_output()

    def fail(self, plan: StepPlan, message: str, now: float) -> StepOutput:
        """Take in that the runner lost a step: every request in it ends with an error."""
        del message, now
        apply_failure(self._state, plan)
        return self._state.take_output()

    def has_work(self) -> bool:
        """Some request is open, or a planned step has not been read back."""
        return bool(self._state.groups or self._state.flights)

    def counts(self) -> SchedulerCounts:
        """Snapshot for metrics and /v1/state."""
        return make_counts(self._state)

    def learn_speed(self, prefill_tokens_per_second: float | None) -> None:
        """Take the measured prefill speed: what preemption and the wait of a full queue cost."""
        self._state.prefill_speed = prefill_tokens_per_second

    def reset_prefix_cache(self) -> tuple[CacheEvent, ...]:
        """Forget cached prefixes; running sequences go on, but publish nothing they computed before.

        Returns the cache events up to and with this one: an idle scheduler reports no step that could tell.
        """
        state = self._state
        state.cache.clear()
        for sequence in state.running:
            sequence.stale = True
            sequence.published = 0
        return state.cache.take_events()

    def check_integrity(self) -> None:
        """Assert the invariants of blocks, tree, rows and queue; linear in everything, for tests."""
        check_state(self._state)

    def _check_queue(self, request: Request) -> Refusal | None:
        """Refuse when the queue is full, with the time its tokens take at the measured speed."""
        settings, queue, speed = self._state.settings, self._state.queue, self._state.prefill_speed
        full = len(queue) >= settings.max_queued_requests
        if not full and (
            not len(queue) or queue.num_tokens + len(request.prompt) <= settings.max_queued_tokens
        ):
            return None
        limits = f"{settings.max_queued_requests} and {settings.max_queued_tokens}"
        message = f"{len(queue)} requests with {queue.num_tokens} tokens wait (limits {limits})"
        delay = queue.num_tokens / speed if speed else None
        return Refusal(request.request_id, RefusalReason.OVERLOADED, message, delay, not full)
