"""Metrics of the gateway. Every label is bounded: pools, classes and tenants are configured, outcomes enumerated."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from millpond_gateway.app.price import compute_cost
from millpond_gateway.proxy.dispatch import Record
from millpond_gateway.routing.index import IndexTotals
from millpond_gateway.world.records import PoolPricing

PREFIX: Final = "millpond_gateway_"
OTHER: Final = "other"
"""Label value for what would add a series past the bound."""
_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_MAX_SERIES: Final = 4096
_LABELS: Final = ("pool", "traffic_class", "tenant")


class Metrics:
    """Everything one process counts; written by the data loop, rendered by the admin thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._refusals = self._make_counter("refusals", "Requests the gateway answered itself.", "reason")
        self.log_lines_dropped = self._make_counter(
            "log_lines_dropped", "Access log lines dropped because the reader was too slow."
        )
        self.open_requests = self._make_gauge("open_requests", "Requests between head and last byte.")
        self.client_connections = self._make_gauge("client_connections", "Open client connections.")
        self.engine_connections = self._make_gauge("engine_connections", "Open connections to engines.")
        self.body_bytes = self._make_gauge("buffered_body_bytes", "Request bodies held.")
        self.loop_lag = self._make_gauge("loop_lag_seconds", "How late the data loop's last timer was.")
        self.view_age = self._make_gauge(
            "view_age_seconds", "Since the watch of pools and pods last proved itself alive."
        )
        self.endpoints = self._make_gauge("endpoints", "Known replicas by state.", "pool", "state")
        self.peers_live = self._make_gauge("peers_live", "Other gateways heard within their lease.")
        self.peers_missing = self._make_gauge("peers_missing", "Listed gateways that count as cut off.")
        self.peers_refused = self._make_counter(
            "peer_connections_refused",
            "Connections of peers refused: strangers, no key, another key.",
            "reason",
        )
        self.ejection_capped = self._make_gauge(
            "ejection_capped", "1 while more replicas of a pool fail than may be ejected.", "pool"
        )
        self.index_tokens = IndexMetrics()
        self.registry.register(self.index_tokens)
        self._requests = RequestMetrics()
        self.registry.register(self._requests)

    def _make_counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _make_gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, text, labels, registry=self.registry)

    def observe(self, record: Record, pool: str, pricing: PoolPricing | None = None) -> None:
        """Count a finished request of a pool."""
        self._requests.observe(record, pool, pricing)

    def observe_refusal(self, reason: str) -> None:
        """Count an answer of the gateway itself; reasons are enumerated."""
        self._refusals.labels(reason).inc()

    def observe_keys(self, pool: str, kind: str) -> None:
        """Count what a prompt's keys came from."""
        self._requests.observe_keys(pool, kind)

    def render(self) -> bytes:
        """Prometheus text."""
        return generate_latest(self.registry)


class _Times:
    """One histogram's counts; plain numbers, since only the data loop writes them."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(_BUCKETS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(_BUCKETS, seconds)] += 1
        self.total += seconds

    def list_buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound."""
        found: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip([*map(str, _BUCKETS), "+Inf"], self.counts, strict=True):
            running += count
            found.append((bound, running))
        return found


class _Series:
    """What is counted for one pool, class and tenant."""

    __slots__ = (
        "cached_tokens",
        "costs",
        "first_byte",
        "hedges",
        "outcomes",
        "output_tokens",
        "prompt_tokens",
        "retries",
        "seconds",
    )

    def __init__(self) -> None:
        self.outcomes: dict[tuple[str, int], int] = {}
        self.costs: dict[str, float] = {}
        """By currency: a price list may change its own."""
        self.seconds = _Times()
        self.first_byte = _Times()
        self.hedges: dict[str, int] = {}
        self.retries = self.prompt_tokens = self.cached_tokens = self.output_tokens = 0


class RequestMetrics(Collector):
    """Counts of finished requests.

    A client library's counter takes a lock and several calls for each increment; ten of them per request cost a
    tenth of relaying it. Here the one writer adds plain numbers and the reader makes families of them.
    """

    def __init__(self) -> None:
        self._series: dict[tuple[str, str, str], _Series] = {}
        self._keys: dict[tuple[str, str], int] = {}

    def observe_keys(self, pool: str, kind: str) -> None:
        """Count one prompt."""
        self._keys[pool, kind] = self._keys.get((pool, kind), 0) + 1

    def observe(self, record: Record, pool: str, pricing: PoolPricing | None = None) -> None:
        """Count one request."""
        series = self._find(pool, record.traffic_class, record.tenant)
        key = (record.outcome, record.status)
        series.outcomes[key] = series.outcomes.get(key, 0) + 1
        series.seconds.observe(record.seconds)
        if record.first_byte_seconds is not None:
            series.first_byte.observe(record.first_byte_seconds)
        if record.attempts > 1:
            series.retries += record.attempts - 1
        if record.hedged:
            series.hedges[record.hedged] = series.hedges.get(record.hedged, 0) + 1
        usage = record.usage
        if usage is not None:
            series.prompt_tokens += usage.prompt_tokens
            series.cached_tokens += usage.cached_tokens or 0
            series.output_tokens += usage.output_tokens
            if pricing is not None:
                series.costs[pricing.currency] = series.costs.get(pricing.currency, 0.0) + compute_cost(
                    usage, pricing
                )

    def _find(self, pool: str, traffic_class: str, tenant: str) -> _Series:
        labels = (pool, traffic_class, tenant)
        series = self._series.get(labels)
        if series is None:
            if len(self._series) >= _MAX_SERIES:
                labels = (OTHER, OTHER, OTHER)
            series = self._series.setdefault(labels, _Series())
        return series

    def collect(self) -> Iterator[Metric]:
        """Families of everything counted so far."""
        everything = list(self._series.items())
        requests = CounterMetricFamily(
            PREFIX + "requests", "Finished requests.", labels=(*_LABELS, "outcome", "status")
        )
        seconds = HistogramMetricFamily(
            PREFIX + "request_seconds", "From the last body byte to the last answered byte.", labels=_LABELS
        )
        first = HistogramMetricFamily(
            PREFIX + "first_byte_seconds",
            "From the last body byte to the first answered byte.",
            labels=_LABELS,
        )
        for labels, series in everything:
            for (outcome, status), count in list(series.outcomes.items()):
                requests.add_metric((*labels, str(outcome), str(status)), count)
            seconds.add_metric(labels, series.seconds.list_buckets(), series.seconds.total)
            first.add_metric(labels, series.first_byte.list_buckets(), series.first_byte.total)
        yield from (requests, seconds, first)
        for name, text in _TOTALS.items():
            family = CounterMetricFamily(PREFIX + name, text, labels=_LABELS)
            for labels, series in everything:
                family.add_metric(labels, getattr(series, name))
            yield family
        costs = CounterMetricFamily(
            PREFIX + "cost",
            "Cost of finished requests by the pool's price list.",
            labels=(*_LABELS, "currency"),
        )
        for labels, series in everything:
            for currency, amount in list(series.costs.items()):
                costs.add_metric((*labels, currency), amount)
        yield costs
        hedges = CounterMetricFamily(
            PREFIX + "hedges", "Second attempts beside late ones.", labels=(*_LABELS, "result")
        )
        for labels, series in everything:
            for result, count in list(series.hedges.items()):
                hedges.add_metric((*labels, result), count)
        yield hedges
        keys = CounterMetricFamily(
            PREFIX + "prompt_keys",
            "Prompts by what their keys came from; Text is the fallback.",
            labels=("pool", "kind"),
        )
        for (pool, kind), count in list(self._keys.items()):
            keys.add_metric((pool, str(kind)), count)
        yield keys


class IndexMetrics(Collector):
    """Prompt tokens of audited requests by who counted them.

    `Prompt` falls with the workload; `Routed` and `Held` tell what the index's layers expected, `Predicted` both
    together; `Real` is what engines found. Where two part, that part of the way loses hits.
    """

    def __init__(self) -> None:
        self.pools: dict[str, IndexTotals] = {}

    def collect(self) -> Iterator[Metric]:
        """One family."""
        family = CounterMetricFamily(
            PREFIX + "index_tokens",
            "Prompt tokens of answered requests, and how many of them a cache was expected, or found, to hold.",
            labels=("pool", "series"),
        )
        for pool, totals in list(self.pools.items()):
            family.add_metric((pool, "Prompt"), totals.prompt_tokens)
            family.add_metric((pool, "Predicted"), totals.predicted_tokens)
            family.add_metric((pool, "Routed"), totals.routed_tokens)
            family.add_metric((pool, "Held"), totals.held_tokens)
            family.add_metric((pool, "Real"), totals.real_tokens)
        yield family


_TOTALS: Final = {
    "retries": "Attempts after the first.",
    "prompt_tokens": "Prompt tokens counted by engines, estimated for streams they did not finish.",
    "cached_tokens": "Prompt tokens found in caches, counted by engines.",
    "output_tokens": "Output tokens counted by engines, by events for streams they did not finish.",
}
