"""An exchange that may send a late request to a second engine while the first has provably not begun it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from millpond_gateway.proxy.dispatch import HEDGE_LOST, HEDGE_WON, Call, Ending, Outcome, Target
from millpond_gateway.proxy.exchange import Exchange
from millpond_gateway.proxy.hedging import Hedge
from millpond_gateway.proxy.phases import Phase
from millpond_gateway.proxy.records import RequestHead
from millpond_gateway.proxy.reply import Reply
from millpond_gateway.proxy.retry import Evidence

if TYPE_CHECKING:
    from millpond_gateway.proxy.relay import Relay

_ASK_SECONDS: Final = 0.5
"""Between two questions about one attempt."""


class HedgedExchange(Exchange):
    """Owner of at most one second attempt at a time; to the client there is one request and one answer."""

    __slots__ = ("_ask_at", "_begun", "_hedge")

    def __init__(self, relay: Relay, reply: Reply, *, head: RequestHead, call: Call, body: bytes) -> None:
        super().__init__(relay, reply, head=head, call=call, body=body)
        self._hedge: Hedge | None = None
        self._begun: Target | None = None
        """The attempt that is not asked about any more: its engine has begun it, or it was hedged."""
        self._ask_at = 0.0

    def _look_for_hedge(self, now: float) -> None:
        """Ask a late attempt's engine whether it has begun, now and then until it has; if not, hedge."""
        target = self._target
        if (
            self.phase is not Phase.WAITING
            or target is None
            or self._hedge is not None
            or self._begun is target
        ):
            return
        if now >= self._ask_at and self._relay.dispatcher.is_late(self._call, target, now):
            self._ask_at = now + _ASK_SECONDS
            self._relay.spawn(self._hedge_unstarted(target))

    async def _hedge_unstarted(self, target: Target) -> None:
        waits = await self._relay.is_waiting(target, self._call.request_id)
        if not waits:
            self._begun = target
        if not waits or self.phase is not Phase.WAITING or self._target is not target or self._hedge:
            return
        second = self._relay.dispatcher.hedge(
            self._call, target, self._tried | {target.endpoint.uid}, self._relay.now()
        )
        if second is not None:
            self._attempts += 1
            self._begun = target
            self._hedged = HEDGE_LOST
            self._hedge = Hedge(self._relay, self, second)
            self._hedge.start()

    def _stand_in(self, outcome: Outcome) -> bool:
        hedge = self._hedge
        if hedge is None:
            return False
        self._kept_answer, self._kept_body = None, b""
        if self._target is not None:
            self._tried |= {self._target.endpoint.uid}
        self._release(outcome)
        self._hedge, self._hedged = None, HEDGE_WON
        self._target = hedge.target
        self._connection = hedge.connection
        self.phase = Phase.WAITING
        hedge.choose()
        return True

    def on_hedge_connected(self, hedge: Hedge) -> None:
        """It stands for the request, and is sent."""
        self._connection = hedge.connection
        self._sent_at = self._last_byte_at = self._relay.now()

    def on_hedge_won(self, hedge: Hedge) -> None:
        """The second attempt answers first: the first one ends unheard."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        connection, self._connection = self._connection, hedge.connection
        if connection is not None:
            connection.cancel()
        self._kept_answer, self._kept_body = None, b""
        self._release(Outcome.HEDGE_LOST)
        self._hedge, self._hedged = None, HEDGE_WON
        self._target = hedge.target

    def on_hedge_over(self, hedge: Hedge, outcome: Outcome, status: int | None) -> None:
        """It ended by itself; the first attempt goes on."""
        self._hedge = None
        ending = Ending(outcome=outcome, status=status)
        self._relay.dispatcher.release(self._call, hedge.target, ending, self._relay.now())

    def on_hedge_failed(self, evidence: Evidence, message: str) -> None:
        """It stood for the request and failed."""
        self._connection = None
        self._fail(evidence, message)

    def _drop_hedge(self) -> None:
        """The first attempt answers first, or nobody waits any more."""
        hedge, self._hedge = self._hedge, None
        if hedge is not None:
            hedge.cancel()
            ending = Ending(outcome=Outcome.HEDGE_LOST)
            self._relay.dispatcher.release(self._call, hedge.target, ending, self._relay.now())
