"""One request between its client and the engines: decide, send, relay, and end exactly once.

deciding -> (held ->) connecting -> waiting -> relaying -> ended
                ^         |             |
                |         +-- failed ---+--> proving
                +------- not started --------+
"""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import TYPE_CHECKING

from millpond_common.contract.openai import ApiError, ErrorCode
from millpond_gateway.proxy import headers
from millpond_gateway.proxy.dispatch import DEADLINES, Call, Decision, Ending, Outcome, Record, Target
from millpond_gateway.proxy.engine import AnswerHead, Breakage, EngineConnection
from millpond_gateway.proxy.http1 import RequestHead
from millpond_gateway.proxy.overload import is_overload
from millpond_gateway.proxy.reply import Reply
from millpond_gateway.proxy.retry import Evidence, Verdict, decide_retry, name_evidence, name_outcome
from millpond_gateway.routing.records import Usage

if TYPE_CHECKING:
    from millpond_gateway.proxy.relay import Relay


class Phase(StrEnum):
    """Where a request is."""

    HELD = "Held"
    CONNECTING = "Connecting"
    WAITING = "Waiting"
    PROVING = "Proving"
    RELAYING = "Relaying"
    ENDED = "Ended"


class Exchange:
    """Owns the request from its last body byte to its last answered byte; `end` is the one finaliser."""

    __slots__ = (
        "_attempts",
        "_body",
        "_bytes_in",
        "_call",
        "_connection",
        "_first_byte_at",
        "_head",
        "_kept_answer",
        "_kept_body",
        "_last_byte_at",
        "_last_sent_at",
        "_relay",
        "_reply",
        "_reused",
        "_sent_at",
        "_target",
        "_task",
        "_tried",
        "_usage",
        "phase",
    )

    def __init__(self, relay: Relay, reply: Reply, *, head: RequestHead, call: Call, body: bytes) -> None:
        self._relay = relay
        self._reply = reply
        self._head = head
        self._call = call
        self._body, self._bytes_in = body, len(body)
        self._target: Target | None = None
        self._connection: EngineConnection | None = None
        self._task: asyncio.Task[None] | None = None
        self._tried: frozenset[str] = frozenset()
        self._attempts = 0
        self._reused = False
        self._kept_answer: AnswerHead | None = None
        self._kept_body = b""
        self._sent_at = self._last_byte_at = self._last_sent_at = call.arrived_at
        self._first_byte_at: float | None = None
        self._usage: Usage | None = None
        self.phase = Phase.HELD

    # Deciding.

    def decide(self) -> None:
        """Ask for a replica; the answer may come later."""
        self.phase = Phase.HELD
        decision = self._relay.dispatcher.submit(
            self._call, self._tried, self._on_decision, self._relay.now()
        )
        if decision is not None:
            self._on_decision(decision)

    def _on_decision(self, decision: Decision) -> None:
        if isinstance(decision, ApiError):
            self._refuse(decision)
            return
        self._target = decision
        self._attempts += 1
        self._kept_answer = None
        self._kept_body = b""
        connection = self._relay.connections.take(decision.endpoint)
        self._reused = connection is not None
        if connection is not None:
            self._send(connection)
        else:
            self._connect(decision)

    def _connect(self, target: Target) -> None:
        self.phase = Phase.CONNECTING
        self._task = self._relay.spawn(self._open(target))

    async def _open(self, target: Target) -> None:
        try:
            connection = await self._relay.connections.open(target.endpoint)
        except OSError as error:
            self._task = None
            self._fail(Evidence.NOT_CONNECTED, f"no connection: {error}")
            return
        self._task = None
        if self._target is target:
            self._send(connection)
        else:
            connection.close()

    def _send(self, connection: EngineConnection) -> None:
        target = self._target
        assert target is not None
        self.phase = Phase.WAITING
        self._connection = connection
        self._sent_at = self._last_byte_at = self._relay.now()
        head = headers.make_engine_head(
            self._head,
            host=target.endpoint.address.encode(),
            body_bytes=len(self._body),
            request_id=self._call.request_id.encode(),
            tenant=self._call.caller.tenant.encode(),
            traffic_class=target.traffic_class.encode(),
            deadline_milliseconds=target.count_left_milliseconds(self._sent_at - self._call.arrived_at),
            drop_authorization=bool(self._call.caller.tenant),
        )
        connection.send(self, head + self._body)

    # The engine's answer.

    def on_head(self, head: AnswerHead) -> None:
        """Pass the head on, or keep an answer that another replica may better."""
        now = self._relay.now()
        target = self._target
        assert target is not None
        epoch = head.find(headers.EPOCH)
        if epoch is not None and epoch.decode("latin-1") != target.endpoint.epoch:
            self._relay.dispatcher.note_epoch(target, epoch.decode("latin-1"), now)
        self._last_byte_at = now
        if self._must_keep(head):
            self._kept_answer = head
            return
        self._begin_relay(now)
        if not self._reply.begun:
            self._reply.begin(head, target.debug)

    def _must_keep(self, head: AnswerHead) -> bool:
        """An overload answer may be bettered elsewhere; an error after an early head becomes an event."""
        if self._reply.early:
            return head.status != 200
        return head.status == 503 and self._attempts < self._relay.settings.max_attempts

    def _begin_relay(self, now: float) -> None:
        self.phase = Phase.RELAYING
        self._drop_body()
        if self._first_byte_at is None:
            self._first_byte_at = now
        assert self._target is not None
        self._relay.dispatcher.first_byte(self._target, now)

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
        self._reply.begin(kept, self._target.debug if self._target else ())
        self._reply.write(body)

    # Failure.

    def _fail(self, evidence: Evidence, message: str, *, asked: bool = False) -> None:
        target = self._target
        assert target is not None
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
        if now - self._call.arrived_at > settings.total_seconds:
            self._give_up(Outcome.TOTAL_DEADLINE, f"no complete answer within {settings.total_seconds:g} s")
        elif self.phase is Phase.WAITING and now - self._sent_at > settings.first_byte_seconds:
            self._give_up(Outcome.FIRST_BYTE_DEADLINE, f"no answer within {settings.first_byte_seconds:g} s")
        elif self.phase is Phase.RELAYING and not paused and now - self._last_byte_at > settings.idle_seconds:
            self._give_up(Outcome.IDLE_DEADLINE, f"the answer stood still for {settings.idle_seconds:g} s")
        elif settings.comment_seconds and self._call.body.stream and not paused:
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
        if self.phase is Phase.HELD:
            self._relay.dispatcher.withdraw(self._call, self._relay.now())
        self.phase = Phase.ENDED
        traffic_class = self._target.traffic_class if self._target else ""
        endpoint = self._target.endpoint.pod if self._target else ""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._usage = self._reply.find_usage()
        self._release(outcome)
        self._drop_body()
        record = self._make_record(outcome, reason, traffic_class, endpoint)
        self._relay.dispatcher.finish(self._call, record, self._relay.now())
        self._relay.on_exchange_end(self, record)

    def _release(self, outcome: Outcome) -> None:
        target, self._target = self._target, None
        if target is not None:
            status = self._kept_answer.status if self._kept_answer else self._reply.status or None
            ending = Ending(outcome=outcome, status=status, usage=self._usage)
            self._relay.dispatcher.release(self._call, target, ending, self._relay.now())

    def _cancel_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.cancel()

    def _drop_body(self) -> None:
        if self._body:
            self._relay.give_body_back(len(self._body))
            self._body = b""

    def _make_record(self, outcome: Outcome, reason: str, traffic_class: str, endpoint: str) -> Record:
        first = self._first_byte_at
        return Record(
            request_id=self._call.request_id,
            method=self._head.method.decode("latin-1"),
            path=self._call.path,
            model=self._call.body.model,
            tenant=self._call.caller.tenant,
            traffic_class=traffic_class,
            endpoint=endpoint,
            status=self._reply.status,
            outcome=outcome,
            reason=reason,
            stream=self._call.body.stream,
            attempts=self._attempts,
            seconds=self._relay.now() - self._call.arrived_at,
            first_byte_seconds=first - self._call.arrived_at if first is not None else None,
            bytes_in=self._bytes_in,
            bytes_out=self._reply.bytes_out,
            usage=self._usage,
        )
