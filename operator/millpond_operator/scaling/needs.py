"""Replicas that each axis of demand asks for.

    prefill = max(arrivals / utilisation, arrivals + backlog / (2 * horizon)) / capacity
    decode  = (output tokens per second / utilisation) / decode capacity
    memory  = used blocks / (kvPercent of one replica's blocks)
    queue   = backlog / queuedTokens

Worked: 3,000 uncached tokens/s, 400,000 waiting, 100 s to start a replica, 2,000 tokens/s each:
max(3000 / 0.8, 3000 + 400000 / 200) / 2000 = 2.5 replicas. The free fifth works off a small backlog by
itself, so it is not added on top: adding both overshot a threefold step by half in the replay.
"""

from __future__ import annotations

from millpond_common.contract.reasons import ScalingReason
from millpond_operator.scaling.records import (
    TOLERANCE,
    UTILISATION,
    Capacity,
    Demand,
    KvLoad,
    Need,
    ScalingSnapshot,
)

RISE = 1.3
"""The 15 s rate counts once it is this much above the minute's: below that it mostly is noise (a fifth, at the
few dozen requests that arrive in 15 s at one replica)."""
BACKLOG_HORIZONS = 2.0
"""Backlog is to be gone within this many start times; sooner would start replicas that idle once it is."""


def compute_needs(snapshot: ScalingSnapshot) -> tuple[Need, ...]:
    """Needs of the role's axes whose inputs are there; an absent input gives no need, never a need of zero."""
    limits, demand, capacity = snapshot.limits, snapshot.demand, snapshot.capacity
    prompts = [
        _prefill(demand, capacity, snapshot.horizon_seconds),
        _queue(demand, limits.queued_tokens),
    ]
    outputs = [_decode(demand, capacity), _memory(snapshot.kv, limits.kv_percent)]
    found = [
        *(prompts if snapshot.axes != "Decode" else ()),
        *(outputs if snapshot.axes != "Prefill" else ()),
    ]
    return tuple(need for need in found if need is not None)


def find_rate(snapshot: ScalingSnapshot) -> float | None:
    """Tokens per second of the role's own demand: prompt tokens, or output tokens for decode; None while unknown."""
    if snapshot.demand is None:
        return None
    return (
        snapshot.demand.output_per_second if snapshot.axes == "Decode" else compute_arrivals(snapshot.demand)
    )


def find_capacity(snapshot: ScalingSnapshot) -> float | None:
    """What one replica sustains of that demand; None while unmeasured."""
    capacity = snapshot.capacity
    return capacity.decode_per_second if snapshot.axes == "Decode" else capacity.prefill_per_second


def compute_arrivals(demand: Demand) -> float | None:
    """Uncached tokens per second over a minute, or over 15 s once those are clearly faster: a rise, not noise."""
    slow, fast = demand.uncached_per_second_60, demand.uncached_per_second_15
    if slow is None or fast is None:
        return fast if slow is None else slow
    return fast if fast > slow * RISE else slow


def make_careful(needs: tuple[Need, ...], *, utilisation: float) -> tuple[Need, ...]:
    """Needs at a lower utilisation of the rate axes, and with the tolerance on the others: for a smaller fleet."""
    rates = (ScalingReason.PREFILL_DEMAND, ScalingReason.DECODE_DEMAND)
    factor = UTILISATION / utilisation
    return tuple(Need(n.replicas * (factor if n.reason in rates else 1 + TOLERANCE), n.reason) for n in needs)


def _prefill(demand: Demand | None, capacity: Capacity, horizon_seconds: float) -> Need | None:
    arrivals = compute_arrivals(demand) if demand else None
    if demand is None or arrivals is None or not capacity.prefill_per_second:
        return None
    rate = max(
        arrivals / UTILISATION,
        arrivals + demand.backlog_tokens / (BACKLOG_HORIZONS * max(horizon_seconds, 1.0)),
    )
    return Need(rate / capacity.prefill_per_second, ScalingReason.PREFILL_DEMAND)


def _decode(demand: Demand | None, capacity: Capacity) -> Need | None:
    if demand is None or demand.output_per_second is None or not capacity.decode_per_second:
        return None
    return Need(
        demand.output_per_second / UTILISATION / capacity.decode_per_second, ScalingReason.DECODE_DEMAND
    )


def _memory(kv: KvLoad | None, kv_percent: int | None) -> Need | None:
    if kv is None or kv_percent is None or kv.blocks_per_replica <= 0:
        return None
    return Need(kv.used_blocks / (kv.blocks_per_replica * kv_percent / 100), ScalingReason.KV_PRESSURE)


def _queue(demand: Demand | None, queued_tokens: int | None) -> Need | None:
    if demand is None or not queued_tokens:
        return None
    return Need(demand.backlog_tokens / queued_tokens, ScalingReason.QUEUED_TOKENS)
