"""Metrics of the gateway. Every label is bounded: pools, classes and tenants are configured, outcomes enumerated."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from millpond_gateway.proxy.dispatch import Record

_LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_MAX_SERIES = 4096
OTHER = "other"
"""Label value for what would add a series past the bound."""


class Metrics:
    """Counters and gauges of one process; safe to read from another thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ("pool", "traffic_class", "tenant")
        prefix = "millpond_gateway_"
        self.requests = Counter(
            prefix + "requests", "Finished requests.", (*labels, "outcome", "status"), registry=self.registry
        )
        self.seconds = Histogram(
            prefix + "request_seconds",
            "From the last body byte to the last answered byte.",
            labels,
            buckets=_LATENCY_BUCKETS,
            registry=self.registry,
        )
        self.first_byte = Histogram(
            prefix + "first_byte_seconds",
            "From the last body byte to the first answered byte.",
            labels,
            buckets=_LATENCY_BUCKETS,
            registry=self.registry,
        )
        self._retries = Counter(
            prefix + "retries", "Attempts after the first.", ("pool",), registry=self.registry
        )
        self.prompt = Counter(
            prefix + "prompt_tokens", "Prompt tokens counted by engines.", labels, registry=self.registry
        )
        self.cached = Counter(
            prefix + "cached_tokens",
            "Prompt tokens found in caches, counted by engines.",
            labels,
            registry=self.registry,
        )
        self.output = Counter(
            prefix + "output_tokens", "Output tokens counted by engines.", labels, registry=self.registry
        )
        self._refusals = Counter(
            prefix + "refusals", "Requests the gateway answered itself.", ("reason",), registry=self.registry
        )
        self._keys = Counter(
            prefix + "prompt_keys",
            "Prompts by what their keys came from; Text is the fallback.",
            ("pool", "kind"),
            registry=self.registry,
        )
        self.open_requests = Gauge(
            prefix + "open_requests", "Requests between head and last byte.", registry=self.registry
        )
        self.client_connections = Gauge(
            prefix + "client_connections", "Open client connections.", registry=self.registry
        )
        self.engine_connections = Gauge(
            prefix + "engine_connections", "Open connections to engines.", registry=self.registry
        )
        self.body_bytes = Gauge(
            prefix + "buffered_body_bytes", "Request bodies held.", registry=self.registry
        )
        self.loop_lag = Gauge(
            prefix + "loop_lag_seconds", "How late the data loop's last timer was.", registry=self.registry
        )
        self.view_age = Gauge(
            prefix + "view_age_seconds",
            "Since the watch of pools and pods last proved itself alive.",
            registry=self.registry,
        )
        self.endpoints = Gauge(
            prefix + "endpoints", "Known replicas by state.", ("pool", "state"), registry=self.registry
        )
        self.log_lines_dropped = Counter(
            prefix + "log_lines_dropped",
            "Access log lines dropped because the reader was too slow.",
            registry=self.registry,
        )
        self._key_children: dict[tuple[str, str], Counter] = {}
        self._series: dict[tuple[str, ...], _Series] = {}

    def observe(self, record: Record, pool: str) -> None:
        """Count a finished request of a pool."""
        series = self._find_series(pool, record.traffic_class, record.tenant)
        series.find_outcome(record.outcome.value, record.status).inc()
        series.seconds.observe(record.seconds)
        if record.first_byte_seconds is not None:
            series.first_byte.observe(record.first_byte_seconds)
        if record.attempts > 1:
            self._retries.labels(pool).inc(record.attempts - 1)
        usage = record.usage
        if usage is not None:
            series.prompt.inc(usage.prompt_tokens)
            series.cached.inc(usage.cached_tokens or 0)
            series.output.inc(usage.output_tokens)

    def observe_refusal(self, reason: str) -> None:
        """Count an answer of the gateway itself; reasons are enumerated."""
        self._refusals.labels(reason).inc()

    def observe_keys(self, pool: str, kind: str) -> None:
        """Count what a prompt's keys came from."""
        child = self._key_children.get((pool, kind))
        if child is None:
            child = self._key_children[pool, kind] = self._keys.labels(pool, kind)
        child.inc()

    def render(self) -> bytes:
        """Prometheus text."""
        return generate_latest(self.registry)

    def _find_series(self, *labels: str) -> _Series:
        series = self._series.get(labels)
        if series is None:
            if len(self._series) >= _MAX_SERIES:
                labels = (OTHER, OTHER, OTHER)
            series = self._series.setdefault(labels, _Series(self, labels))
        return series


class _Series:
    """Children of one label set, looked up once."""

    __slots__ = ("_labels", "_outcomes", "_requests", "cached", "first_byte", "output", "prompt", "seconds")

    def __init__(self, metrics: Metrics, labels: tuple[str, ...]) -> None:
        self._labels = labels
        self._requests = metrics.requests
        self._outcomes: dict[tuple[str, int], Counter] = {}
        self.seconds = metrics.seconds.labels(*labels)
        self.first_byte = metrics.first_byte.labels(*labels)
        self.prompt = metrics.prompt.labels(*labels)
        self.cached = metrics.cached.labels(*labels)
        self.output = metrics.output.labels(*labels)

    def find_outcome(self, outcome: str, status: int) -> Counter:
        """Child of one outcome and status."""
        child = self._outcomes.get((outcome, status))
        if child is None:
            child = self._requests.labels(*self._labels, outcome, str(status))
            self._outcomes[outcome, status] = child
        return child
