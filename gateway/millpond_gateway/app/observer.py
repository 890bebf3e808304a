"""What is written down of every request: metrics, access log, traces."""

from __future__ import annotations

from millpond_gateway.app.access import AccessLog
from millpond_gateway.app.fleet import Fleet
from millpond_gateway.app.metrics import Metrics
from millpond_gateway.app.traces import RequestTrace, Tracing
from millpond_gateway.proxy.dispatch import Outcome, Record
from millpond_gateway.proxy.records import RequestHead


class RequestObserver:
    """The relay's observer."""

    def __init__(
        self, fleet: Fleet, metrics: Metrics, access: AccessLog | None, tracing: Tracing | None
    ) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._access = access
        self._tracing = tracing

    def begin(self, head: RequestHead) -> RequestTrace | None:
        """Open a request's span, where traces are made."""
        return self._tracing.begin(head) if self._tracing is not None else None

    def observe(self, record: Record) -> None:
        """Count and log a finished request."""
        pool = self._fleet.find_pool_name(record.model)
        if record.outcome is Outcome.REFUSED:
            self._metrics.observe_refusal(record.reason)
        if record.model:
            state = self._fleet.pools.get(pool)
            self._metrics.observe(record, pool, state.spec.pricing if state is not None else None)
        if self._access is not None:
            self._access.write(record, pool)
        if self._tracing is not None and record.trace is not None:
            self._tracing.end(record.trace, record, pool)
