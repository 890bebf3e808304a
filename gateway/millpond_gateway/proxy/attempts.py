"""The way of one request to its engines: decide, connect, send, and give back what was reserved."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import msgspec

from millpond_common.contract.openai import ApiError
from millpond_gateway.proxy import headers
from millpond_gateway.proxy.dispatch import Call, Decision, Ending, Outcome, Target
from millpond_gateway.proxy.engine import EngineConnection
from millpond_gateway.proxy.hidden import ask_usage
from millpond_gateway.proxy.phases import Phase
from millpond_gateway.proxy.records import AnswerHead, Breakage, RequestHead
from millpond_gateway.proxy.reply import Reply
from millpond_gateway.proxy.retry import Evidence
from millpond_gateway.routing.records import Usage

if TYPE_CHECKING:
    from millpond_gateway.proxy.relay import Relay


class Attempts(ABC):
    """What is known of one request, and its way to an engine; `Exchange` adds what comes back."""

    __slots__ = (
        "_attempts",
        "_body",
        "_bytes_in",
        "_call",
        "_connection",
        "_decision",
        "_first_byte_at",
        "_head",
        "_hedged",
        "_kept_answer",
        "_kept_body",
        "_last_byte_at",
        "_last_sent_at",
        "_relay",
        "_reply",
        "_reused",
        "_sent",
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
        if call.body.hides_usage and relay.settings.hidden_usage:
            self._body = ask_usage(body, has_options=call.body.has_stream_options)
        self._target: Target | None = None
        self._connection: EngineConnection | None = None
        self._task: asyncio.Task[None] | None = None
        self._hedged = ""
        self._decision = ""
        self._tried: frozenset[str] = frozenset()
        self._attempts = 0
        self._reused = self._sent = False
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
        self._decision = decision.decision or self._decision
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
        self._sent = True
        self._sent_at = self._last_byte_at = self._relay.now()
        connection.send(self, self.make_request(target))

    def make_request(self, target: Target) -> bytes:
        """Head and body for one engine."""
        waited = self._relay.now() - self._call.arrived_at
        head = headers.make_engine_head(
            self._head,
            host=target.endpoint.address.encode(),
            prefix=target.endpoint.prefix.encode(),
            body_bytes=len(self._body),
            request_id=self._call.request_id.encode(),
            tenant=self._call.caller.tenant.encode(),
            traffic_class=target.traffic_class.encode(),
            deadline_milliseconds=target.count_left_milliseconds(waited),
            drop_authorization=self._call.caller.keyed,
            traceparent=self._call.trace.traceparent if self._call.trace is not None else b"",
        )
        return head + self._body

    def _release(self, outcome: Outcome) -> None:
        target, self._target = self._target, None
        if target is not None:
            status = self._kept_answer.status if self._kept_answer else self._reply.status or None
            ending = Ending(
                outcome=outcome,
                status=status,
                usage=self._usage,
                sent=self._sent,
                num_events=self._reply.num_events,
            )
            self._relay.dispatcher.release(self._call, target, ending, self._relay.now())

    def _cancel_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.cancel()

    def _drop_body(self) -> None:
        if self._body:
            self._relay.give_body_back(self._bytes_in)
            self._body = b""
            if self._call.body.stream:
                self._call = msgspec.structs.replace(self._call, body=self._call.body.forget_prompt())

    # Second attempts; see `HedgedExchange`.

    def _look_for_hedge(self, now: float) -> None:  # noqa: B027 - an exchange without hedges is whole
        """While the engine is silent."""

    def _stand_in(self, outcome: Outcome) -> bool:
        """Whether another attempt goes on in place of one that failed."""
        return False

    def _drop_hedge(self) -> None:  # noqa: B027 - as above
        """The first attempt answers first, or nobody waits any more."""

    # What the exchange adds.

    @abstractmethod
    def _fail(self, evidence: Evidence, message: str, *, asked: bool = False) -> None:
        """An attempt failed."""

    @abstractmethod
    def _refuse(self, error: ApiError) -> None:
        """There is no replica for it."""

    @abstractmethod
    def on_head(self, head: AnswerHead) -> None: ...

    @abstractmethod
    def on_data(self, data: bytes) -> None: ...

    @abstractmethod
    def on_read(self) -> None: ...

    @abstractmethod
    def on_end(self) -> None: ...

    @abstractmethod
    def on_broken(self, breakage: Breakage) -> None: ...
