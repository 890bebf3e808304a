"""The decision: recommendation first, then up, hold or down, then limits. Pure and idempotent.

Order of rules, each of which can bind and is then named in the result: data, tolerance, pending
replicas as supply, rate limit, stabilization, fleet minus one, cached value, minimum and maximum.
"""

from __future__ import annotations

import math
from dataclasses import replace

from millpond_common.contract.reasons import ScalingReason
from millpond_operator.scaling.freshness import drop_stale, find_gap
from millpond_operator.scaling.needs import compute_needs, find_capacity, find_rate, make_careful
from millpond_operator.scaling.records import TOLERANCE, UTILISATION, Decision, Need, ScalingSnapshot

MAX_STEP = 4
"""Replicas added per loop at least; beyond that the count may double."""
FLEET_UTILISATION = 0.6
"""A smaller fleet must carry the demand at no more than this: between it and UTILISATION nothing moves."""


def decide(snapshot: ScalingSnapshot, now: float) -> Decision:
    """Decide the replica count of one role of one pool."""
    fresh = drop_stale(snapshot, now)
    needs = compute_needs(fresh)
    zero = _decide_zero(fresh, needs)
    if zero is not None:
        return _finish(zero, fresh, needs)
    gap = find_gap(snapshot, now)
    need = _recommend(fresh, needs)
    recommendation = math.ceil(need.replicas - 1e-9)
    supply = fresh.supply
    if recommendation > supply.wanted - supply.count_suspect(fresh.horizon_seconds):
        decision = _go_up(fresh, need)
    elif gap is not None:
        decision = Decision(supply.wanted, recommendation, gap, (gap,))
    elif recommendation < supply.wanted:
        decision = _go_down(fresh, needs, need, now)
    else:
        floor = (ScalingReason.WARM_FLOOR,) if _is_warm(need) else ()
        decision = Decision(supply.wanted, recommendation, ScalingReason.STEADY, floor)
    return _finish(decision, fresh, needs)


def _decide_zero(snapshot: ScalingSnapshot, needs: tuple[Need, ...]) -> Decision | None:
    limits, demand, current = snapshot.limits, snapshot.demand, snapshot.supply.wanted
    if demand is None:
        return None
    if current == 0 and _is_called(snapshot):
        wanted = max(math.ceil(_recommend(snapshot, needs).replicas - 1e-9), 1)
        bounds = (ScalingReason.RATE_LIMIT,) if wanted > MAX_STEP else ()
        return Decision(min(wanted, MAX_STEP), wanted, ScalingReason.HELD_DEMAND, bounds)
    everyone = demand.gateways_reporting >= demand.gateways_expected > 0
    if current == 0 and limits.min_replicas == 0:
        return Decision(0, 0, ScalingReason.IDLE)
    if limits.min_replicas > 0 or limits.idle_seconds is None or not everyone or demand.idle_seconds is None:
        return None
    is_idle = (
        demand.idle_seconds >= limits.idle_seconds
        and demand.backlog_tokens == 0
        and demand.held_requests == 0
    )
    return Decision(0, 0, ScalingReason.IDLE) if is_idle else None


def _is_called(snapshot: ScalingSnapshot) -> bool:
    """Whether somebody wants a pool that is at zero.

    Held requests say so. Where nothing is held, or the client has left between two looks, the request itself does: a
    pool only goes to zero after `idle_seconds` without one, so a more recent one came after that.
    """
    demand, idle_seconds = snapshot.demand, snapshot.limits.idle_seconds
    if demand is None:
        return False
    if demand.held_requests > 0 or demand.backlog_tokens > 0:
        return True
    last = demand.last_request_seconds
    return last is not None and idle_seconds is not None and last < idle_seconds


def _recommend(snapshot: ScalingSnapshot, needs: tuple[Need, ...]) -> Need:
    """The strongest axis; without any, what is there now. At least one: only the rules of zero end at zero."""
    if not needs:
        # What is there now, without suspects: nothing asks for their replacement.
        counted = snapshot.supply.wanted - snapshot.supply.count_suspect(snapshot.horizon_seconds)
        return Need(float(max(counted, snapshot.warm_floor)), ScalingReason.NO_DATA)
    floor = Need(float(max(snapshot.warm_floor, 1)), ScalingReason.WARM_FLOOR)
    strongest = max(needs, key=lambda need: need.replicas)
    return floor if floor.replicas > math.ceil(strongest.replicas - 1e-9) else strongest


def _is_warm(need: Need) -> bool:
    """Whether bursts ask for more than the demand of now; one replica is everybody's floor."""
    return need.reason is ScalingReason.WARM_FLOOR and need.replicas > 1


def _go_up(snapshot: ScalingSnapshot, need: Need) -> Decision:
    supply = snapshot.supply
    suspect = supply.count_suspect(snapshot.horizon_seconds)
    counted = supply.wanted - suspect
    recommendation = math.ceil(need.replicas - 1e-9)
    bounds = (ScalingReason.PENDING_SUSPECT,) if suspect else ()
    if counted > 0 and need.replicas <= counted * (1 + TOLERANCE):
        return Decision(supply.wanted, recommendation, need.reason, (*bounds, ScalingReason.WITHIN_TOLERANCE))
    missing = recommendation - counted
    room = max(MAX_STEP, counted)
    if missing > room:
        missing = room
        bounds = (*bounds, ScalingReason.RATE_LIMIT)
    return Decision(supply.wanted + missing, recommendation, need.reason, bounds)


def _go_down(snapshot: ScalingSnapshot, needs: tuple[Need, ...], need: Need, now: float) -> Decision:
    supply = snapshot.supply
    recommendation = math.ceil(need.replicas - 1e-9)
    floor = _compute_floor(needs)
    steady = _find_window_maximum(snapshot, now)
    if floor >= supply.wanted:
        return Decision(supply.wanted, recommendation, need.reason, (ScalingReason.FLEET_MINUS_ONE,))
    if steady is None or steady >= supply.wanted:
        return Decision(supply.wanted, recommendation, need.reason, (ScalingReason.STABILIZING,))
    target = max(steady, floor, snapshot.warm_floor, 1)
    suspect = supply.count_suspect(snapshot.horizon_seconds)
    if suspect and supply.ready < recommendation:
        # What stands in for a suspect is not ready yet; without it the next loop would ask for it again.
        target = max(target, min(recommendation + suspect, supply.wanted))
        if target == supply.wanted:
            return Decision(target, recommendation, need.reason, (ScalingReason.PENDING_SUSPECT,))
    kept = _find_fleet_worth_keeping(snapshot, target)
    bounds = (ScalingReason.WARM_FLOOR,) if target == snapshot.warm_floor > max(steady, floor, 1) else ()
    bounds = (*bounds, ScalingReason.CACHED_VALUE) if kept > target else bounds
    return Decision(kept, recommendation, need.reason, bounds)


def _compute_floor(needs: tuple[Need, ...]) -> int:
    """Smallest fleet that still meets every target with margin: above it nothing has to come back soon."""
    careful = make_careful(needs, utilisation=FLEET_UTILISATION)
    return max((math.ceil(need.replicas - 1e-9) for need in careful), default=0)


def _find_window_maximum(snapshot: ScalingSnapshot, now: float) -> int | None:
    """Highest floor of the stabilization window; None while the history does not cover it."""
    begin = now - snapshot.limits.stabilization_seconds
    if not snapshot.history or snapshot.history[0].at > begin:
        return None
    return max((r.replicas for r in snapshot.history if r.at >= begin), default=0)


def _find_fleet_worth_keeping(snapshot: ScalingSnapshot, target: int) -> int:
    """Stop shrinking where the prompts that lose their cached prefix would no longer fit the rest.

    Pending replicas hold no cache, so only what is ready is looked at. Prompts are computed where they are cached, so
    a fleet that only decodes loses nothing.
    """
    arrivals, capacity = find_rate(snapshot), find_capacity(snapshot)
    if arrivals is None or capacity is None or snapshot.axes == "Decode":
        return target
    fleet, lost = snapshot.supply.ready, 0.0
    for reuse in snapshot.victim_reuse_per_second:
        if fleet <= target:
            break
        lost += reuse
        if lost > 0 and arrivals + lost > capacity * UTILISATION * (fleet - 1):
            return fleet
        fleet -= 1
    return target


def _finish(decision: Decision, snapshot: ScalingSnapshot, needs: tuple[Need, ...]) -> Decision:
    """Apply minimum and maximum last, and add the numbers."""
    limits = snapshot.limits
    replicas, bounds = decision.replicas, decision.bounds
    if replicas < limits.min_replicas:
        replicas, bounds = limits.min_replicas, (*bounds, ScalingReason.MIN_REPLICAS)
    if replicas > limits.max_replicas:
        replicas, bounds = limits.max_replicas, (*bounds, ScalingReason.MAX_REPLICAS)
    if _is_unreachable(snapshot):
        bounds = (*bounds, ScalingReason.TARGET_UNREACHABLE)
    demand = find_rate(snapshot)
    finished = replace(
        decision,
        replicas=replicas,
        bounds=bounds,
        floor=_compute_floor(needs),
        demand_per_second=demand,
        capacity_per_second=find_capacity(snapshot),
        needs=needs,
    )
    return replace(finished, message=explain(finished, snapshot))


def _is_unreachable(snapshot: ScalingSnapshot) -> bool:
    target, best = snapshot.limits.ttft_milliseconds, snapshot.capacity.reachable_ttft_milliseconds
    return target is not None and best is not None and best > target


def explain(decision: Decision, snapshot: ScalingSnapshot) -> str:
    """One sentence with the numbers, for status and events."""
    supply = snapshot.supply
    parts = [
        f"{decision.replicas} replicas ({supply.ready} ready, {len(supply.pending_ages)} pending): {decision.reason}"
    ]
    if decision.demand_per_second is not None:
        capacity = f"{decision.capacity_per_second:.0f}" if decision.capacity_per_second else "unknown"
        unit = "output" if snapshot.axes == "Decode" else "uncached"
        parts.append(f"demand {decision.demand_per_second:.0f} of {capacity} {unit} tokens/s per replica")
    if snapshot.demand is not None and snapshot.demand.backlog_tokens:
        parts.append(f"{snapshot.demand.backlog_tokens} tokens waiting")
    if decision.recommendation != decision.replicas:
        parts.append(f"recommended {decision.recommendation}")
    if decision.bounds:
        parts.append("bound by " + ", ".join(decision.bounds))
    return "; ".join(parts)
