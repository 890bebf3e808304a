"""A second attempt beside one that is late; whichever answers first is the request's only attempt from then on.

Until its answer's head is in, a hedge is nobody: its failure changes nothing. It wins by a head that is no server
error; then the first attempt is cancelled and everything further passes through to the exchange.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from millpond_gateway.proxy.dispatch import Outcome, Target
from millpond_gateway.proxy.engine import AnswerSink, EngineConnection
from millpond_gateway.proxy.records import AnswerHead, Breakage
from millpond_gateway.proxy.retry import Evidence, name_evidence, name_outcome

if TYPE_CHECKING:
    from millpond_gateway.proxy.relay import Relay


class HedgeOwner(AnswerSink, Protocol):
    """The exchange."""

    def make_request(self, target: Target) -> bytes:
        """Head and body for one engine."""

    def on_hedge_connected(self, hedge: Hedge) -> None:
        """The hedge that stands for the request now has its connection."""

    def on_hedge_won(self, hedge: Hedge) -> None:
        """Its answer began first."""

    def on_hedge_over(self, hedge: Hedge, outcome: Outcome, status: int | None) -> None:
        """It ended without becoming the request's attempt; called once, then nothing more is told."""

    def on_hedge_failed(self, evidence: Evidence, message: str) -> None:
        """It failed while it stood for the request."""


class Hedge:
    """One second attempt."""

    __slots__ = ("_chosen", "_over", "_owner", "_relay", "_task", "connection", "target")

    def __init__(self, relay: Relay, owner: HedgeOwner, target: Target) -> None:
        self._relay = relay
        self._owner = owner
        self.target = target
        self.connection: EngineConnection | None = None
        self._task: asyncio.Task[None] | None = None
        self._chosen = self._over = False

    def start(self) -> None:
        """Send the request, over a kept connection or a new one."""
        connection = self._relay.connections.take(self.target.endpoint)
        if connection is not None:
            self._send(connection)
        else:
            self._task = self._relay.spawn(self._open())

    async def _open(self) -> None:
        try:
            connection = await self._relay.connections.open(self.target.endpoint)
        except OSError as error:
            self._task = None
            self._fail(Evidence.NOT_CONNECTED, f"no connection: {error}")
            return
        self._task = None
        self._send(connection)

    def _send(self, connection: EngineConnection) -> None:
        self.connection = connection
        connection.send(self, self._owner.make_request(self.target))
        if self._chosen:
            self._owner.on_hedge_connected(self)

    def choose(self) -> None:
        """The first attempt failed: this one stands for the request from now on."""
        self._chosen = True

    def cancel(self) -> None:
        """End at once; the engine drops the request when its connection ends."""
        if self._over:
            return
        self._over = True
        if self._task is not None:
            self._task.cancel()
        if self.connection is not None:
            self.connection.cancel()

    def _lose(self, outcome: Outcome, status: int | None = None) -> None:
        self.cancel()
        self._owner.on_hedge_over(self, outcome, status)

    def _fail(self, evidence: Evidence, message: str) -> None:
        if self._chosen:
            self._owner.on_hedge_failed(evidence, message)
        else:
            self._lose(name_outcome(evidence))

    # The engine's answer.

    def on_head(self, head: AnswerHead) -> None:
        """Win, or go quietly."""
        if not self._chosen:
            if head.status >= 500:
                outcome = Outcome.OVERLOADED if head.status == 503 else Outcome.COMPLETED
                self._lose(outcome, head.status)
                return
            self._chosen = True
            self._owner.on_hedge_won(self)
        self._owner.on_head(head)

    def on_data(self, data: bytes) -> None:
        """Pass on."""
        self._owner.on_data(data)

    def on_read(self) -> None:
        """Pass on."""
        self._owner.on_read()

    def on_end(self) -> None:
        """Pass on."""
        self._owner.on_end()

    def on_broken(self, breakage: Breakage) -> None:
        """Pass on, or go quietly."""
        self.connection = None
        if self._chosen:
            self._owner.on_broken(breakage)
        else:
            self._lose(name_outcome(name_evidence(breakage)))
