"""The rule under test and its rivals as their documentation describes them, each reduced to one signal path.

Rivals: Kubernetes HPA on queue length per ready pod; KEDA (the same through its own polling); the
saturation rule of the workload variant autoscaler; the two loops of the Dynamo planner.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from millpond_operator.scaling.decide import decide
from millpond_operator.scaling.records import (
    Capacity,
    Demand,
    Recommended,
    ScalingLimits,
    ScalingSnapshot,
    Supply,
)
from millpond_simulator.autoscaling.fluid import Observation, Setting


@dataclass(slots=True)
class Millpond:
    """Millpond's decision, fed with what the gateways would report."""

    setting: Setting
    name: str = "millpond"
    stabilization_seconds: float = 300.0
    history: deque[Recommended] = field(default_factory=deque)

    def decide(self, seen: Observation) -> int:
        """Translate the observation into a snapshot and ask."""
        decision = decide(self._make_snapshot(seen), seen.now)
        if seen.waiting_work is not None:
            self.history.append(Recommended(seen.now, decision.floor))
        while self.history and self.history[0].at < seen.now - 2 * self.stabilization_seconds:
            self.history.popleft()
        return decision.replicas

    def _make_snapshot(self, seen: Observation) -> ScalingSnapshot:
        return ScalingSnapshot(
            limits=ScalingLimits(
                1, self.setting.max_replicas, stabilization_seconds=self.stabilization_seconds
            ),
            supply=Supply(seen.ready, seen.pending_ages),
            demand=None if seen.waiting_work is None else _make_demand(seen),
            kv=None,
            capacity=Capacity(self.setting.capacity),
            horizon_seconds=self.setting.load_seconds,
            history=tuple(self.history),
        )


def _make_demand(seen: Observation) -> Demand:
    return Demand(
        observed_at=seen.now,
        gateways_reporting=1,
        gateways_expected=1,
        uncached_per_second_15=seen.arrivals_15,
        uncached_per_second_60=seen.arrivals_60 if seen.now >= 60 else None,
        output_per_second=None,
        held_tokens=0,
        queued_tokens=int(seen.waiting_work or 0.0),
    )


@dataclass(slots=True)
class HpaQueue:
    """HPA: ceil(ready * value / target) outside the tolerance, its default behaviour, 300 s down window."""

    target: float = 5.0
    name: str = "HPA, queue length 5"
    poll_seconds: float = 15.0
    window: deque[tuple[float, int]] = field(default_factory=deque)
    last_poll: float = -math.inf
    last_seen: int | None = None

    def decide(self, seen: Observation) -> int:
        """One sync of the controller. A failed metric leaves the count as it is."""
        current = seen.ready + len(seen.pending_ages)
        if seen.now - self.last_poll >= self.poll_seconds:
            self.last_poll, self.last_seen = seen.now, seen.waiting_requests
        if self.last_seen is None or seen.ready == 0:
            return current
        ratio = self.last_seen / seen.ready / self.target
        wanted = current if abs(ratio - 1) <= 0.1 else math.ceil(seen.ready * ratio)
        self.window.append((seen.now, wanted))
        while self.window[0][0] < seen.now - 300:
            self.window.popleft()
        if wanted > current:
            return min(wanted, max(current * 2, current + 4))
        return min(current, max(count for _, count in self.window))


@dataclass(slots=True)
class Keda(HpaQueue):
    """KEDA: the same formula, fed by a scaler that polls every 30 s."""

    name: str = "KEDA, queue length 5"
    poll_seconds: float = 30.0


@dataclass(slots=True)
class Saturation:
    """Add one when any replica is saturated, take one when the simulated rest keeps its spare; wait for pending ones."""

    name: str = "WVA, saturation"

    def decide(self, seen: Observation) -> int:
        """KV use is stood in for by utilisation, which the fluid has."""
        current = seen.ready + len(seen.pending_ages)
        if seen.utilisation is None or seen.waiting_requests is None or seen.pending_ages or seen.ready == 0:
            return current
        queue = seen.waiting_requests / seen.ready
        if seen.utilisation >= 0.80 or queue >= 5 or 0.80 - seen.utilisation < 0.1 or 5 - queue < 3:
            return current + 1
        if current > 1:
            rest = current / (current - 1)
            if 0.80 - seen.utilisation * rest >= 0.1 and 5 - queue * rest >= 3:
                return current - 1
        return current


@dataclass(slots=True)
class TwoLoops:
    """A throughput loop of 180 s sets a floor from the last rate; a load loop moves by one on latency."""

    setting: Setting
    name: str = "Dynamo, two loops"
    floor: int = 1
    last_throughput: float = -math.inf

    def decide(self, seen: Observation) -> int:
        """Nothing is changed without data or while a start is pending."""
        current = seen.ready + len(seen.pending_ages)
        if seen.arrivals_60 is None or seen.wait_seconds is None:
            return current
        if seen.now - self.last_throughput >= 180:
            self.last_throughput = seen.now
            self.floor = max(1, math.ceil(seen.arrivals_60 / self.setting.capacity))
        if seen.pending_ages:
            return max(current, self.floor)
        if seen.wait_seconds > self.setting.target_seconds:
            return max(current + 1, self.floor)
        utilisation = seen.utilisation if seen.utilisation is not None else 1.0
        fits = current > 1 and utilisation * current / (current - 1) < 0.9
        if seen.wait_seconds < 0.8 * self.setting.target_seconds and fits:
            return max(current - 1, self.floor)
        return max(current, self.floor)
