"""The autoscaler's numbers as metrics, so that KEDA, an HPA or a person reads what Millpond itself decides from.

An unknown number has no series: a reader that takes absence for zero would shrink a pool in an outage.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from millpond_operator.plan.autoscale import Judged
from millpond_operator.plan.publish import find_binding
from millpond_operator.scaling.needs import compute_arrivals
from millpond_operator.scaling.records import Demand

PREFIX = "millpond_operator_scaling_"
WHO = ("pool_namespace", "pool")
"""Not `namespace`, which a scrape sets to the operator's own."""
GAUGES = {
    "recommendation_replicas": "Replicas the numbers ask for, before history, rates and limits.",
    "decision_replicas": "Replicas after every rule; for a pool whose count is owned elsewhere, what would be decided.",
    "demand_tokens_per_second": "Uncached prompt tokens per second that arrive at all gateways together.",
    "output_tokens_per_second": "Output tokens per second of all gateways together.",
    "backlog_tokens": "Uncached prompt tokens that wait in gateways and engines.",
    "held_requests": "Requests that gateways hold.",
    "idle_seconds": "Since the last request that a ready replica could have served; 0 while something waits.",
    "capacity_tokens_per_second": "Uncached prompt tokens per second that one replica was measured to sustain.",
    "kv_used_ratio": "KV blocks of live sequences over all blocks of the ready replicas.",
    "start_seconds": "Measured time from creating a replica to its being ready, 90th percentile.",
    "ready_replicas": "Replicas that serve.",
    "pending_replicas": "Replicas that are wanted and do not serve yet.",
    "active": "1 while every input a decision needs is there and fresh; absent where nothing is decided.",
}


class ScalingMetrics:
    """Gauges by pool."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._gauges = {
            name: Gauge(PREFIX + name, text, WHO, registry=registry) for name, text in GAUGES.items()
        }
        self._reason = Gauge(
            PREFIX + "reason",
            "1 on the rule that bound the last decision, or on the axis that decided.",
            (*WHO, "reason"),
            registry=registry,
        )
        self._changes = Counter(
            PREFIX + "changes",
            "Changes of the decision by direction.",
            (*WHO, "direction"),
            registry=registry,
        )
        self._reasons: dict[tuple[str, str], str] = {}
        self._decisions: dict[tuple[str, str], int] = {}

    def show(self, key: tuple[str, str], judged: Judged, *, decides: bool) -> None:
        """Take over the numbers; `decides` is False for a pool whose count somebody else owns."""
        for name, value in _list_values(judged, decides=decides).items():
            if value is None:
                self._drop(self._gauges[name], key)
            else:
                self._gauges[name].labels(*key).set(value)
        reason = str(find_binding(judged.decision))
        if self._reasons.get(key, reason) != reason:
            self._drop(self._reason, (*key, self._reasons[key]))
        self._reasons[key] = reason
        self._reason.labels(*key, reason).set(1)
        self._count(key, judged.decision.replicas)

    def forget(self, key: tuple[str, str]) -> None:
        """Drop the series of a pool that is gone."""
        for gauge in self._gauges.values():
            self._drop(gauge, key)
        if key in self._reasons:
            self._drop(self._reason, (*key, self._reasons.pop(key)))
        self._decisions.pop(key, None)
        for direction in ("up", "down"):
            self._drop(self._changes, (*key, direction))

    def _count(self, key: tuple[str, str], replicas: int) -> None:
        before = self._decisions.get(key, replicas)
        self._decisions[key] = replicas
        if replicas != before:
            self._changes.labels(*key, "up" if replicas > before else "down").inc()

    def _drop(self, family: Gauge | Counter, labels: tuple[str, ...]) -> None:
        family.remove(*labels)


def _list_values(judged: Judged, *, decides: bool) -> dict[str, float | None]:
    made, seen = judged.decision, judged.snapshot
    demand, kv = seen.demand, seen.kv
    blocks = kv.blocks_per_replica * max(seen.supply.ready, kv.replicas_reporting) if kv is not None else 0
    return {
        "recommendation_replicas": made.recommendation,
        "decision_replicas": made.replicas,
        "demand_tokens_per_second": compute_arrivals(demand) if demand is not None else None,
        "output_tokens_per_second": demand.output_per_second if demand is not None else None,
        "backlog_tokens": demand.backlog_tokens if demand is not None else None,
        "held_requests": demand.held_requests if demand is not None else None,
        "idle_seconds": _find_idle(demand) if demand is not None else None,
        "capacity_tokens_per_second": seen.capacity.prefill_per_second,
        "kv_used_ratio": kv.used_blocks / blocks if kv is not None and blocks else None,
        "start_seconds": judged.start_seconds,
        "ready_replicas": seen.supply.ready,
        "pending_replicas": len(seen.supply.pending_ages),
        "active": (0 if judged.gap is not None else 1) if decides else None,
    }


def _find_idle(demand: Demand) -> float | None:
    """Idle time; None while a gateway cannot say."""
    if demand.held_requests > 0 or demand.backlog_tokens > 0:
        return 0.0
    return max(0.0, demand.idle_seconds) if demand.idle_seconds is not None else None
