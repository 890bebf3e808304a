"""One request between its client and the engines: decide, send, relay, and end exactly once.

deciding -> (held ->) connecting -> waiting -> relaying -> ended
                ^         |             |
                |         +-- failed ---+--> proving
                +------- not started --------+
"""

from __future__ import annotations

import msgspec

from millpond_common.contract.openai import ApiError, ErrorCode
from millpond_gateway.proxy import headers
from millpond_gateway.proxy.attempts import Attempts
from millpond_gateway.proxy.dispatch import DEADLINES, Outcome, Target
from millpond_gateway.proxy.overload import is_overload
from millpond_gateway.proxy.phases import Phase, find_overdue
from millpond_gateway.proxy.records import AnswerHead, Breakage, Header
from millpond_gateway.proxy.retry import Evidence, Verdict, decide_retry, name_evidence, name_outcome
from millpond_gateway.proxy.summary import make_record


class Exchange(Attempts):
    """Owns the request from its last body byte to its last answered byte; `end` is the one finaliser."""

    __slots__ = ()

    # The engine's answer.

    def on_head(self, head: AnswerHead) -> None:
        """Pass the head on, or keep an answer that another replica may better."""
        now = self._relay.now()
        target = self._target
        assert target is not None
        epoch = headers.find_header(head.headers, headers.EPOCH)
        if epoch is not None and epoch.decode("latin-1") != target.endpoint.epoch:
            self._relay.dispatcher.note_epoch(target, epoch.decode("latin-1"), now)
        self._last_byte_at = now
        if self._must_keep(head):
            self._kept_answer = head
            return
        self._begin_relay(now)
        if not self._reply.begun:
            self._reply.begin(head, self._find_debug())

    def _find_debug(self) -> tuple[Header, ...]:
        """The choice, for a client that may know it."""
        if self._target is None or not self._relay.settings.expose_decisions:
            return ()
        return self._target.debug

    def _must_keep(self, head: AnswerHead) -> bool:
        """An overload answer may be bettered elsewhere; an error after an early head becomes an event."""
        if self._reply.early:
            return head.status != 200
        return head.status == 503 and self._attempts < self._relay.settings.max_attempts

    def _begin_relay(self, now: float) -> None:
        self.phase = Phase.RELAYING
        self._drop_hedge()
        self._drop_body()
        if self._first_byte_at is None:
            self._first_byte_at = now
        assert self._target is not None
        self._relay.dispatcher.first_byte(self._call, self._target, now)

    def on_data(self, data: bytes) -> None:
        """Pass bytes on at once."""
        self._last_byte_at = self._last_sent_at = self._relay.now()
        if self._kept_answer is None:
            self._reply.write(data)
            return
        self._kept_body += data
        if len(self._kept_body) > self._relay.settings.max_overload_answer_bytes:
            self._pass_kept_answer()

    def on_read(self) -> None:
        """Send what the engine's last read held."""
        self._reply.flush()

    def on_end(self) -> None:
        """The engine's answer is complete."""
        self._connection = None
        kept = self._kept_answer
        if kept is not None and is_overload(kept, self._kept_body):
            self._fail(Evidence.OVERLOAD_ANSWERED, "the replica is overloaded")
            return
        if kept is not None:
            self._pass_kept_answer()
        if self.phase is Phase.ENDED:
            return
        finished = self._reply.said_done or self._reply.said_error
        if self._reply.is_stream and self._reply.status == 200 and not finished:
            self._give_up(Outcome.STREAM_BROKEN, "the replica ended the stream without finishing it")
            return
        self._reply.end()
        self.end(Outcome.COMPLETED)

    def on_broken(self, breakage: Breakage) -> None:
        """The engine's connection ended before its answer did."""
        self._connection = None
        if breakage.bad_answer and self.phase is Phase.WAITING:
            self._give_up(Outcome.BAD_ANSWER, breakage.message)
            return
        self._fail(name_evidence(breakage), breakage.message)

    def _pass_kept_answer(self) -> None:
        """Hand the engine's own answer to the client after all, unchanged."""
        kept, body = self._kept_answer, self._kept_body
        assert kept is not None
        self._kept_answer, self._kept_body = None, b""
        if self.phase is not Phase.RELAYING and self._target is not None:
            self._begin_relay(self._relay.now())
        if self._reply.early:
            self._reply.break_off_with(body)
            self._cancel_connection()
            self.end(Outcome.COMPLETED)
            return
        self._reply.begin(kept, self._find_debug())
        self._reply.write(body)

    # Failure.

    def _fail(self, evidence: Evidence, message: str, *, asked: bool = False) -> None:
        target = self._target
        assert target is not None
        if evidence is not Evidence.ANSWER_BEGAN and self._stand_in(name_outcome(evidence)):
            return
        verdict = decide_retry(
            evidence,
            attempts=self._attempts,
            max_attempts=self._relay.settings.max_attempts,
            reused=self._reused,
            asked=asked,
        )
        if verdict is Verdict.RECONNECT:
            self._attempts += 1
            self._reused = False
            self._connect(target)
        elif verdict is Verdict.PROVE:
            self.phase = Phase.PROVING
            self._task = self._relay.spawn(self._prove(target, message))
        elif verdict is Verdict.ELSEWHERE:
            self._go_elsewhere(name_outcome(evidence))
        else:
            self._give_up(name_outcome(evidence), message)

    async def _prove(self, target: Target, message: str) -> None:
        evidence = await self._relay.find_evidence(target, self._call.request_id)
        self._task = None
        if self._target is target:
            self._fail(evidence, message, asked=True)

    def _go_elsewhere(self, outcome: Outcome) -> None:
        target = self._target
        assert target is not None
        self._tried |= {target.endpoint.uid}
        kept, kept_body = self._kept_answer, self._kept_body
        self._release(outcome)
        decision = self._relay.dispatcher.submit(
            self._call, self._tried, self._on_decision, self._relay.now()
        )
        if isinstance(decision, ApiError) and kept is not None:
            self._kept_answer, self._kept_body = kept, kept_body
            self._pass_kept_answer()
            if self.phase is not Phase.ENDED:
                self._reply.end()
                self.end(Outcome.OVERLOADED)
        elif decision is not None:
            self._on_decision(decision)
        else:
            self.phase = Phase.HELD

    def _give_up(self, outcome: Outcome, message: str) -> None:
        code = ErrorCode.DEADLINE_EXCEEDED if outcome in DEADLINES else ErrorCode.REPLICA_FAILED
        self._cancel_connection()
        self._reply.refuse(ApiError(code, message), reason=outcome.value)
        self.end(outcome)

    def _refuse(self, error: ApiError) -> None:
        self._reply.refuse(error)
        self.end(Outcome.REFUSED, reason=error.code.value)

    # The client.

    def on_client_gone(self) -> None:
        """Stop the engine at once: it aborts what its connection's end leaves alone."""
        self._cancel_connection()
        self.end(Outcome.CLIENT_LEFT)

    def poke(self) -> bool:
        """Send a comment, where the begun answer can take one; False before it began. The answer is the last one."""
        self._reply.close_after()
        if self._reply.begun and self._relay.settings.comment_seconds and self._kept_answer is None:
            self._reply.comment()
        return self._reply.begun

    def on_client_slow(self) -> None:
        """Stop reading from the engine."""
        if self._connection is not None:
            self._connection.pause()

    def on_client_ready(self) -> None:
        """Read on."""
        self._last_byte_at = self._relay.now()  # the silence was the client's
        if self._connection is not None:
            self._connection.resume()

    # Time.

    def check(self, now: float, *, paused: bool) -> None:
        """Enforce the deadlines and keep a silent stream alive."""
        settings = self._relay.settings
        overdue = find_overdue(
            self.phase,
            settings,
            total_seconds=now - self._call.arrived_at,
            sent_seconds=now - self._sent_at,
            silent_seconds=now - self._last_byte_at,
            paused=paused,
        )
        if overdue is not None:
            self._give_up(*overdue)
            return
        self._look_for_hedge(now)
        if settings.comment_seconds and self._call.body.stream and not paused:
            self._comment(now, settings.comment_seconds)

    def _comment(self, now: float, silence: float) -> None:
        if now - self._last_sent_at < silence or self._kept_answer is not None:
            return
        self._last_sent_at = now
        if not self._reply.begun:
            self._reply.begin_early()
        self._reply.comment()

    def shut_down(self) -> None:
        """The gateway's own grace is over."""
        self._cancel_connection()
        self._reply.refuse(
            ApiError(ErrorCode.DRAINING, "the gateway is shutting down", retry_after_seconds=1)
        )
        self.end(Outcome.SHUTDOWN)

    # The end.

    def end(self, outcome: Outcome, *, reason: str = "") -> None:
        """Release, record and free everything, once."""
        if self.phase is Phase.ENDED:
            return
        now = self._relay.now()
        if self.phase is Phase.HELD:
            self._relay.dispatcher.withdraw(self._call, now)
        self.phase = Phase.ENDED
        traffic_class = self._target.traffic_class if self._target else ""
        endpoint = self._target.endpoint.pod if self._target else ""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._drop_hedge()
        self._usage = self._reply.find_usage()
        self._release(outcome)
        self._drop_body()
        record = make_record(
            self._call,
            self._reply,
            method=self._head.method,
            traffic_class=traffic_class,
            endpoint=endpoint,
            outcome=outcome,
            reason=reason,
            attempts=self._attempts,
            seconds=now - self._call.arrived_at,
            first_byte_at=self._first_byte_at,
            bytes_in=self._bytes_in,
            usage=self._usage,
            sent=self._sent,
            hedged=self._hedged,
            decision=self._decision,
        )
        settled = self._relay.dispatcher.finish(self._call, record, now)
        if settled is not None and record.usage is None:
            record = msgspec.structs.replace(record, usage=settled, estimated=True)
        self._relay.on_exchange_end(self, record)
