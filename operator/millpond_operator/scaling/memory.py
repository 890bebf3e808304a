"""What is kept of one pool between two decisions. Frozen, bounded, and rebuilt from the cluster after a restart.

A new operator knows the count, the capacity and the start time from the pool's status, the start times of living
replicas from their pods, and no history: it holds until the stabilization window is full again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from millpond_operator.scaling.aggregate import EngineSample
from millpond_operator.scaling.learn import (
    BUSY_SHARE,
    CapacityEstimate,
    Interval,
    learn_capacity,
)
from millpond_operator.scaling.records import Demand, Recommended
from millpond_operator.scaling.starts import MAX_STARTS, Start, StartSummary, recall_starts

MAX_START_SECONDS = 7200.0
"""A longer one is not a start: the replica was ready before and lost it for a while."""
PERSISTENT_SECONDS = 2.0
"""Prompt work that waits at both ends of an interval, in seconds of work: the replica was busy in between."""
REUSE_SECONDS = 60.0
"""Window over which a replica's prefix hits are counted."""
BURST_SECONDS = 3600.0
"""How far back bursts are looked for."""
PARTLY_BUSY = 0.3
"""Neither busy enough to show the limit nor idle enough to show the best latency."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The fleet at one decision, to be compared with the next."""

    at: float
    backlog_tokens: int
    waiting: Mapping[str, int]
    """Uncached prompt tokens waiting or running, by replica; every ready one."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """Prefix hits of one replica since the start of a window, and their rate in the last whole one."""

    epoch: str
    at: float
    hit_tokens: int
    per_second: float | None = None
    """None until a window was whole."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Rate of arrivals at one look."""

    at: float
    per_second: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Everything that one decision hands to the next."""

    history: tuple[Recommended, ...] = ()
    capacity: CapacityEstimate = field(default_factory=CapacityEstimate)
    decode_samples: tuple[float, ...] = ()
    starts: tuple[Start, ...] = ()
    """Oldest first."""
    timed: frozenset[str] = frozenset()
    """Replicas whose start was taken."""
    unready_since: Mapping[str, float] = field(default_factory=dict)
    short_since: float | None = None
    """Since when fewer pods exist than are wanted."""
    gateways_since: Mapping[str, float] = field(default_factory=dict)
    tick: Tick | None = None
    reuse: Mapping[str, Reuse] = field(default_factory=dict)
    """By replica."""
    arrived: tuple[Arrived, ...] = ()
    """Of the last hour, oldest first; kept only where a warm floor is asked for."""


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """A replica as the memory follows it."""

    uid: str
    created_at: float
    ready_since: float | None
    restarts: int
    node_kind: str = ""


def recall(*, capacity: int | None, starts: Sequence[StartSummary] = ()) -> Memory:
    """A memory from what the pool's status says."""
    return Memory(
        capacity=CapacityEstimate(profile=float(capacity) if capacity else None), starts=recall_starts(starts)
    )


def note_replicas(memory: Memory, replicas: Sequence[ReplicaFacts], now: float) -> Memory:
    """Take start times of replicas that got ready, and note since when others are not.

    A replica seen unready first is unready since its creation; one that was ready before, since now.
    """
    living = {replica.uid for replica in replicas}
    new = [r for r in replicas if r.ready_since is not None and r.uid not in memory.timed]
    starts = [Start(r.node_kind, s) for r in new if r.restarts == 0 and (s := _measure_start(r)) is not None]
    unready = {
        r.uid: memory.unready_since.get(r.uid, now if r.uid in memory.timed else r.created_at)
        for r in replicas
        if r.ready_since is None
    }
    return replace(
        memory,
        starts=(*memory.starts, *starts)[-MAX_STARTS:],
        timed=(memory.timed | {r.uid for r in new}) & living,
        unready_since=unready,
    )


def _measure_start(replica: ReplicaFacts) -> float | None:
    """Seconds to ready; stamps are whole seconds, so an instant start counts as one."""
    assert replica.ready_since is not None
    seconds = replica.ready_since - replica.created_at
    return max(seconds, 1.0) if 0 <= seconds <= MAX_START_SECONDS else None


def note_gateways(memory: Memory, gateways: Sequence[str], now: float) -> Memory:
    """Since when each gateway's counters are known."""
    return replace(memory, gateways_since={name: memory.gateways_since.get(name, now) for name in gateways})


def drop_holed_history(memory: Memory, now: float, *, max_gap_seconds: float) -> Memory:
    """Forget the history after a hole: nobody knows what was needed meanwhile, so the window begins anew."""
    history = memory.history
    if history and now - history[-1].at > max_gap_seconds:
        return replace(memory, history=())
    return memory


def note_floor(memory: Memory, floor: int, now: float, *, window_seconds: float) -> Memory:
    """Remember the floor of a decision that was made from data.

    The first record stays, which shows since when the need is known; of the others only those that are higher than
    every later one, since the maximum of a window is all that is asked for.
    """
    latest, begin = Recommended(now, floor), now - window_seconds
    if not memory.history:
        return replace(memory, history=(latest,))
    first, *others = memory.history
    higher = [record for record in others if record.at >= begin and record.replicas > floor]
    return replace(memory, history=(first, *higher, latest))


def note_engines(
    memory: Memory,
    samples: Sequence[EngineSample],
    demand: Demand | None,
    *,
    ready: Mapping[str, float],
    speed: float | None,
    ttft_target: float | None,
    now: float,
) -> Memory:
    """Learn capacity from the interval since the last decision.

    What a fleet served is what arrived less what the backlog grew. It shows the limit only where every replica had
    more than PERSISTENT_SECONDS of prompt work waiting at both ends, and only while the fleet did not change.

    Args:
        memory: with the fleet of the last decision.
        samples: states of the ready replicas.
        demand: what the gateways saw.
        ready: ready replicas, by UID since when.
        speed: prefill speed the engines measured: the profile until busy intervals were seen.
        ttft_target: milliseconds.
        now: time of the decision.
    """
    if speed is not None:
        memory = replace(memory, capacity=replace(memory.capacity, profile=speed))
    waiting = {s.pod_uid: s.state.waiting_tokens for s in samples if s.pod_uid in ready}
    if demand is None or not ready or waiting.keys() != ready.keys():
        return replace(memory, tick=None)
    tick = Tick(now, demand.backlog_tokens, waiting)
    before, memory = memory.tick, replace(memory, tick=tick)
    if before is None or before.waiting.keys() != waiting.keys() or now <= before.at:
        return memory
    if demand.uncached_per_second_15 is None:
        return memory
    growth = (tick.backlog_tokens - before.backlog_tokens) / (now - before.at)
    interval = Interval(
        served_per_second=max(demand.uncached_per_second_15 - growth, 0.0) / len(ready),
        busy_share=_find_busy_share(before, tick, memory.capacity.prefill_per_second),
        age_seconds=now - max(ready.values()),
        ttft_milliseconds=demand.ttft_milliseconds,
    )
    return replace(memory, capacity=learn_capacity(memory.capacity, interval, ttft_target=ttft_target))


def _find_busy_share(before: Tick, after: Tick, capacity: float | None) -> float:
    """Share of replicas that were busy throughout; below BUSY_SHARE and above idle where some had work."""
    least = max(1.0, PERSISTENT_SECONDS * capacity if capacity else 1.0)
    pairs = [(before.waiting[uid], tokens) for uid, tokens in after.waiting.items()]
    busy = sum(min(pair) >= least for pair in pairs)
    if not any(max(pair) for pair in pairs):
        return 0.0
    return 1.0 if busy == len(pairs) else min(PARTLY_BUSY, BUSY_SHARE / 2)


def note_decode(memory: Memory, samples: Sequence[EngineSample], *, max_sequences: int) -> Memory:
    """Take the output speed of replicas whose batch is as large as it may be: only there it is their capacity."""
    full = [
        s.state.speeds.decode_tokens_per_second
        for s in samples
        if s.state.num_waiting > 0 and s.state.num_running >= max_sequences
    ]
    known = [speed for speed in full if speed is not None and speed > 0]
    return replace(memory, decode_samples=(*memory.decode_samples, *known)[-MAX_STARTS:])


def find_decode_capacity(memory: Memory) -> float | None:
    """Low quantile of the measured ones; None until a batch was full."""
    ordered = sorted(memory.decode_samples)
    return ordered[len(ordered) // 4] if ordered else None


def note_reuse(memory: Memory, samples: Sequence[EngineSample]) -> Memory:
    """Count prefix hits of the replicas that answered; a restart begins the count anew."""
    known = {
        s.pod_uid: _count_reuse(memory.reuse.get(s.pod_uid), s, s.state.prefix_hit_tokens)
        for s in samples
        if s.state.prefix_hit_tokens is not None
    }
    return replace(memory, reuse=known)


def _count_reuse(before: Reuse | None, sample: EngineSample, hit_tokens: int) -> Reuse:
    if before is None or before.epoch != sample.state.epoch or hit_tokens < before.hit_tokens:
        return Reuse(sample.state.epoch, sample.at, hit_tokens)
    seconds = sample.at - before.at
    if seconds < REUSE_SECONDS:
        return before
    return Reuse(before.epoch, sample.at, hit_tokens, (hit_tokens - before.hit_tokens) / seconds)


def note_arrivals(memory: Memory, rate: float | None, now: float, *, interval_seconds: float) -> Memory:
    """Take the rate of this interval; an unknown one leaves a gap."""
    last = memory.arrived[-1].at if memory.arrived else float("-inf")
    if rate is None or now - last < interval_seconds * 0.9:
        return memory
    kept = (entry for entry in memory.arrived if entry.at > now - BURST_SECONDS)
    return replace(memory, arrived=(*kept, Arrived(now, rate)))
