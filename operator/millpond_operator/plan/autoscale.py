"""The autoscaler's decision about one role: what was fetched, what is remembered, and the pool, into a count with reasons."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from millpond_common.contract.reasons import ScalingReason
from millpond_operator.api.pool import RoleView
from millpond_operator.plan.scale import find_current
from millpond_operator.plan.snapshot import Pod, PoolSnapshot
from millpond_operator.scaling import memory as keep
from millpond_operator.scaling.aggregate import EngineSample, GatewaySample, find_speed, make_demand, make_kv
from millpond_operator.scaling.decide import decide
from millpond_operator.scaling.freshness import find_gap
from millpond_operator.scaling.learn import compute_warm_floor
from millpond_operator.scaling.memory import Memory
from millpond_operator.scaling.needs import find_capacity, find_rate
from millpond_operator.scaling.records import (
    Decision,
    Demand,
    ScalingLimits,
    ScalingSnapshot,
    Supply,
)
from millpond_operator.scaling.starts import Start, find_horizon, find_start_seconds
from millpond_operator.scaling.victim import Candidate, compute_cached_value, find_unique_share, rank_victims

UNLIMITED = 10_000
"""Largest count of the CRD: bound of the recommendation for a pool whose count somebody else owns."""
MAX_GAP_INTERVALS = 4


@dataclass(frozen=True, slots=True)
class ScalingView:
    """What was fetched for one pool."""

    gateways: tuple[GatewaySample, ...] = ()
    num_gateways: int = 0
    """Ready gateways, each of which should have reported."""
    engines: tuple[EngineSample, ...] = ()
    error: str = ""
    """Why the last call failed, if one did."""
    interval_seconds: float = 15.0
    node_kinds: Mapping[str, str] = field(default_factory=dict)
    """Kind of each node by its name; empty where the operator may not see nodes."""
    zones: Mapping[str, str] = field(default_factory=dict)
    """Zone of each node by its name, as far as nodes name one."""
    other_starts: tuple[Start, ...] = ()
    """Start times of other pools that serve the same model."""
    num_silent: int = 0
    """Ready gateways whose last call failed."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A decision with everything that explains it."""

    decision: Decision
    snapshot: ScalingSnapshot
    gap: ScalingReason | None
    """Why the count may not fall now; None while every input is there."""
    gap_message: str
    memory: Memory
    cached_values: Mapping[str, float]
    start_seconds: float | None


def judge_scaling(
    snapshot: PoolSnapshot, role: RoleView, view: ScalingView, memory: Memory, now: float
) -> Judged:
    """Decide the count of one role. Pure: equal inputs give equal decisions."""
    limits = make_limits(role)
    pods = tuple(pod for pod in snapshot.pods if pod.role == role.role.lower() and not pod.deleting)
    current = find_current(snapshot, role.role.lower())
    current = limits.min_replicas if current is None else current
    memory = keep.note_replicas(memory, [_make_facts(pod, view) for pod in pods], now)
    memory = keep.note_gateways(memory, [sample.gateway for sample in view.gateways], now)
    memory = keep.drop_holed_history(memory, now, max_gap_seconds=MAX_GAP_INTERVALS * view.interval_seconds)
    kinds = {view.node_kinds.get(pod.node, "") for pod in pods if pod.node}
    horizon = find_horizon(memory.starts, view.other_starts, kinds)
    supply, memory = make_supply(
        pods,
        current,
        memory,
        now,
        patience_seconds=2 * horizon,
        startup_seconds=float(snapshot.pool.spec.engine.startup_seconds),
    )
    ready = {pod.uid: pod.ready_since or now for pod in pods if pod.serving}
    engines = tuple(sample for sample in view.engines if sample.pod_uid in ready)
    demand = _make_demand(snapshot, view, memory, frozenset(ready), now)
    demand = demand and _rest_idle(demand, ready, horizon_seconds=horizon, now=now)
    memory = _learn(
        snapshot, view, memory, engines=engines, demand=demand, ready=ready, limits=limits, now=now
    )
    values = _find_values(view, engines)
    scaling = ScalingSnapshot(
        limits=limits,
        supply=supply,
        demand=demand,
        kv=make_kv(engines, num_ready=len(ready)),
        capacity=memory.capacity.to_capacity(keep.find_decode_capacity(memory)),
        horizon_seconds=horizon,
        axes=role.role,
        history=memory.history,
        stale_after_seconds=2 * view.interval_seconds,
        victim_reuse_per_second=_find_reuses(snapshot, view, values=values, memory=memory, engines=engines),
    )
    scaling, memory = _add_warm_floor(scaling, role, memory, view, now)
    decision, gap = decide(scaling, now), find_gap(scaling, now)
    if gap is None:
        memory = keep.note_floor(memory, decision.floor, now, window_seconds=limits.stabilization_seconds)
    return Judged(
        decision=decision,
        snapshot=scaling,
        gap=gap,
        gap_message=_explain_gap(gap, scaling, view, snapshot) if gap is not None else "",
        memory=memory,
        cached_values=values,
        start_seconds=find_start_seconds(memory.starts, view.other_starts, kinds),
    )


def make_limits(role: RoleView) -> ScalingLimits:
    """What the user asked for; without `scaling` only the numbers are of interest, so nothing bounds them."""
    spec = role.scaling
    if spec is None:
        return ScalingLimits(0, UNLIMITED)
    return ScalingLimits(
        min_replicas=spec.min_replicas,
        max_replicas=spec.max_replicas,
        queued_tokens=spec.targets.queued_tokens,
        kv_percent=spec.targets.kv_percent,
        ttft_milliseconds=spec.targets.ttft_milliseconds,
        stabilization_seconds=float(spec.scale_down_stabilization_seconds),
        idle_seconds=float(spec.idle_seconds),
    )


def make_supply(
    pods: tuple[Pod, ...],
    current: int,
    memory: Memory,
    now: float,
    *,
    patience_seconds: float,
    startup_seconds: float,
) -> tuple[Supply, Memory]:
    """Sort what exists into ready and pending so that together they are the current count.

    Pods beyond it (a surge, victims whose deletion has not come) are on their way out. Pods that do not exist yet, or
    that a quota keeps from existing, are pending since they were missed. A replica somebody cordoned serves nobody:
    it is pending as long as it has been there.

    Args:
        pods: of the role, leaving ones excluded.
        current: the count decided last.
        memory: since when replicas are unready or missing.
        now: time of the decision.
        patience_seconds: a pending replica that is older is suspect.
        startup_seconds: how much longer a start may take that is under way: one that loads is not stuck.
    """
    num_ready = min(current, sum(1 for pod in pods if pod.serving))
    pending = [
        (pod, now - memory.unready_since.get(pod.uid, pod.created_at)) for pod in pods if not pod.serving
    ]
    waiting = sorted(
        (
            min(age, patience_seconds)
            if _is_starting(pod) and age <= patience_seconds + startup_seconds
            else age
            for pod, age in pending
        ),
        reverse=True,
    )[: current - num_ready]
    num_missing = current - num_ready - len(waiting)
    since = (memory.short_since if memory.short_since is not None else now) if num_missing else None
    ages = (*waiting, *((now - since,) * num_missing if since is not None else ()))
    supply = Supply(num_ready, tuple(max(0.0, age) for age in ages), draining=max(0, len(pods) - current))
    return supply, replace(memory, short_since=since)


def _is_starting(pod: Pod) -> bool:
    """Fetching or loading for the first time; whether that takes too long the kubelet decides."""
    return pod.scheduled and not pod.cordoned and pod.restarts == 0 and any(c.running for c in pod.containers)


def _make_facts(pod: Pod, view: ScalingView) -> keep.ReplicaFacts:
    since, kind = pod.ready_since if pod.ready else None, view.node_kinds.get(pod.node, "")
    return keep.ReplicaFacts(pod.uid, pod.created_at, since, pod.restarts, node_kind=kind)


def _make_demand(
    snapshot: PoolSnapshot, view: ScalingView, memory: Memory, ready: frozenset[str], now: float
) -> Demand | None:
    """The sum over the gateways; those that know no ready replica look at something else and do not count."""
    targets = {entry.name: entry.ttft_milliseconds for entry in snapshot.pool.spec.scheduling.classes}
    demand = make_demand(
        view.gateways,
        num_expected=view.num_gateways,
        known_since=memory.gateways_since,
        targets=targets,
        now=now,
    )
    if demand is None or not ready:
        return demand
    blind = sum(1 for s in view.gateways if not any(e.pod_uid in ready for e in s.report.endpoints))
    return replace(demand, gateways_reporting=max(0, demand.gateways_reporting - blind))


def _rest_idle(demand: Demand, ready: Mapping[str, float], *, horizon_seconds: float, now: float) -> Demand:
    """Idle time counts from when somebody could have been served: a pool that has just been woken is not idle.

    Without a ready replica it has to have been wanted by nobody for two start times longer.
    """
    if demand.idle_seconds is None:
        return demand
    if not ready:
        return replace(demand, idle_seconds=demand.idle_seconds - 2 * horizon_seconds)
    return replace(demand, idle_seconds=min(demand.idle_seconds, now - max(ready.values())))


def _learn(
    snapshot: PoolSnapshot,
    view: ScalingView,
    memory: Memory,
    *,
    engines: tuple[EngineSample, ...],
    demand: Demand | None,
    ready: Mapping[str, float],
    limits: ScalingLimits,
    now: float,
) -> Memory:
    speed = find_speed([sample.state for sample in engines], [sample.report for sample in view.gateways])
    memory = keep.note_engines(
        memory,
        engines,
        demand,
        ready=ready,
        speed=speed,
        ttft_target=limits.ttft_milliseconds,
        now=now,
    )
    memory = keep.note_reuse(memory, engines)
    return keep.note_decode(memory, engines, max_sequences=snapshot.pool.spec.scheduling.max_sequences)


def _add_warm_floor(
    scaling: ScalingSnapshot, role: RoleView, memory: Memory, view: ScalingView, now: float
) -> tuple[ScalingSnapshot, Memory]:
    """Keep replicas for the bursts of the last hour, where the pool asks for that."""
    if role.scaling is None or role.scaling.warm_floor != "Bursts":
        return scaling, replace(memory, arrived=())
    rate, capacity = find_rate(scaling), find_capacity(scaling)
    memory = keep.note_arrivals(memory, rate, now, interval_seconds=view.interval_seconds)
    floor = compute_warm_floor(
        [entry.per_second for entry in memory.arrived],
        interval_seconds=view.interval_seconds,
        horizon_seconds=scaling.horizon_seconds,
        capacity=capacity,
    )
    return replace(scaling, warm_floor=floor), memory


def _find_reuses(
    snapshot: PoolSnapshot,
    view: ScalingView,
    *,
    engines: Sequence[EngineSample],
    values: Mapping[str, float],
    memory: Memory,
) -> tuple[float, ...]:
    """Demand that each replica's own cache saves, in the order in which they would leave.

    One whose hits have not been counted for a whole window counts as the one that saves most; without any counted
    nobody knows.
    """
    rates = {uid: reuse.per_second for uid, reuse in memory.reuse.items() if reuse.per_second is not None}
    if not rates:
        return ()
    shares = {s.pod_uid: _find_share(view, s.pod_uid) for s in engines}
    zones = {pod.uid: view.zones.get(pod.node, "") for pod in snapshot.pods}
    ranked = rank_victims(
        [Candidate(uid, True, values.get(uid, 0.0), 0, zones.get(uid, "")) for uid in shares]
    )
    return tuple(rates.get(c.pod, max(rates.values())) * shares[c.pod] for c in ranked)


def _find_share(view: ScalingView, uid: str) -> float:
    cached, unique = _find_cached(view, uid)
    return find_unique_share(cached_tokens=cached, unique_tokens=unique)


def _find_cached(view: ScalingView, uid: str) -> tuple[int, int]:
    """Tokens that the gateways expect in a replica's cache, and those of them that no other replica holds."""
    seen = [entry for sample in view.gateways for entry in sample.report.endpoints if entry.pod_uid == uid]
    return (
        max((entry.cached_tokens for entry in seen), default=0),
        max((entry.unique_cached_tokens for entry in seen), default=0),
    )


def _find_values(view: ScalingView, engines: tuple[EngineSample, ...]) -> dict[str, float]:
    """Cached value of each replica that told one."""
    values = {}
    for sample in engines:
        cached, unique = _find_cached(view, sample.pod_uid)
        values[sample.pod_uid] = compute_cached_value(
            sample.state.cached_value_tokens, cached_tokens=cached, unique_tokens=unique
        )
    return values


def _explain_gap(
    gap: ScalingReason, scaling: ScalingSnapshot, view: ScalingView, snapshot: PoolSnapshot
) -> str:
    """What is missing, from where, with the error of the call."""
    error = f": {view.error}" if view.error else ""
    if gap is ScalingReason.CAPACITY_UNKNOWN:
        return "no replica has measured its speed yet, so the count may rise with the queue and not fall"
    if scaling.demand is None:
        if not snapshot.pool.spec.gateway.enabled:
            return "spec.gateway.enabled is false, and only gateways count demand"
        if view.num_gateways == 0:
            return "no gateway is ready to report demand"
        return f"0 of {view.num_gateways} gateways reported about this pool{error}"
    demand = scaling.demand
    if gap is ScalingReason.PARTIAL_DATA:
        blind = _count_known(view, snapshot)
        return (
            f"{max(demand.gateways_reporting, 0)} of {demand.gateways_expected} gateways reported a full window;"
            f" they know {blind}{error}"
        )
    if find_rate(scaling) is None:
        return f"no gateway has counted requests of this pool for long enough yet{error}"
    if scaling.kv is None and scaling.supply.ready > 0:
        return f"0 of {scaling.supply.ready} replicas told how full their KV cache is{error}"
    return f"the numbers are older than {math.floor(scaling.stale_after_seconds)} seconds{error}"


def _count_known(view: ScalingView, snapshot: PoolSnapshot) -> str:
    ready = {pod.uid for pod in snapshot.pods if pod.serving}
    known = {entry.pod_uid for sample in view.gateways for entry in sample.report.endpoints}
    return f"{len(ready & known)} of {len(ready)} ready replicas"
