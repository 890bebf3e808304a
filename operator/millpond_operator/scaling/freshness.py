"""Whether the inputs may be trusted to lower a count. Missing never means zero."""

from __future__ import annotations

from dataclasses import replace

from millpond_common.contract.reasons import ScalingReason
from millpond_operator.scaling.needs import find_capacity, find_rate
from millpond_operator.scaling.records import ScalingSnapshot


def find_gap(snapshot: ScalingSnapshot, now: float) -> ScalingReason | None:
    """First reason why this snapshot must not lower the count; None when every needed input is there and fresh."""
    demand, kv, limits = snapshot.demand, snapshot.kv, snapshot.limits
    rate = find_rate(snapshot)
    if demand is None or rate is None:
        return ScalingReason.NO_DATA
    if now - demand.observed_at > snapshot.stale_after_seconds:
        return ScalingReason.STALE_DATA
    if demand.gateways_reporting < demand.gateways_expected:
        return ScalingReason.PARTIAL_DATA
    if limits.kv_percent is not None and snapshot.axes != "Prefill" and snapshot.supply.ready > 0:
        if kv is None:
            return ScalingReason.NO_DATA
        if now - kv.observed_at > snapshot.stale_after_seconds:
            return ScalingReason.STALE_DATA
    if rate > 0 and not find_capacity(snapshot):
        # Without demand any capacity will do: a pool that never had a request may shrink.
        return ScalingReason.CAPACITY_UNKNOWN
    return None


def drop_stale(snapshot: ScalingSnapshot, now: float) -> ScalingSnapshot:
    """The snapshot without inputs that are too old even to raise a count."""
    demand, kv = snapshot.demand, snapshot.kv
    if demand is not None and now - demand.observed_at > snapshot.stale_after_seconds:
        demand = None
    if kv is not None and now - kv.observed_at > snapshot.stale_after_seconds:
        kv = None
    return replace(snapshot, demand=demand, kv=kv)
