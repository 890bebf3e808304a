"""Metrics of the operator itself."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from millpond_operator.loop.scaling_metrics import ScalingMetrics

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """One registry per operator instance."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconcile_seconds = Histogram(
            "millpond_operator_reconcile_seconds",
            "Duration of one reconcile of a pool.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.reconciles = Counter(
            "millpond_operator_reconciles",
            "Reconciles by result (Done, Error, NotLeader).",
            ["result"],
            registry=self.registry,
        )
        self.api_seconds = Histogram(
            "millpond_operator_api_request_seconds",
            "Duration of calls to the API server.",
            ["verb", "kind"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.api_requests = Counter(
            "millpond_operator_api_requests",
            "Calls to the API server by outcome; code 0 means no answer.",
            ["verb", "kind", "code"],
            registry=self.registry,
        )
        self.leader = Gauge(
            "millpond_operator_leader", "1 while this instance holds the Lease.", registry=self.registry
        )
        self.pools = Gauge("millpond_operator_pools", "Pools known.", registry=self.registry)
        self.pools_ready = Gauge(
            "millpond_operator_pools_ready", "Pools that are Ready.", registry=self.registry
        )
        self.resync_age = Gauge(
            "millpond_operator_resync_age_seconds",
            "Seconds since the last full list of every kind succeeded, or since the start.",
            registry=self.registry,
        )
        self.watch_repairs = Counter(
            "millpond_operator_watch_repairs",
            "Objects that a full list found changed although no watch had said so.",
            ["kind"],
            registry=self.registry,
        )
        self.scaling = ScalingMetrics(self.registry)
        for result in ("Done", "Error", "NotLeader"):
            self.reconciles.labels(result)

    def observe_call(self, verb: str, kind: str, status: int, seconds: float) -> None:
        """Count one call to the API server."""
        self.api_seconds.labels(verb, kind).observe(seconds)
        self.api_requests.labels(verb, kind, str(status)).inc()
