"""The fleet as a fluid: work arrives, ready replicas serve it first come first served, starts take time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from millpond_simulator.autoscaling.trace import Arrival

GENERATED_WEIGHT = 4.0
"""Work of a generated token against one of the prompt."""


def compute_work(arrival: Arrival) -> float:
    """Work units of a request."""
    return arrival.context_tokens + GENERATED_WEIGHT * arrival.generated_tokens


@dataclass(frozen=True, slots=True)
class Setting:
    """What is the same for every rule."""

    capacity: float = 1500.0
    """Work units per second and replica."""
    load_seconds: float = 120.0
    loop_seconds: float = 15.0
    start_replicas: int = 2
    max_replicas: int = 40
    target_seconds: float = 2.0
    outage: tuple[float, float] | None = None
    """Seconds (begin, end) in which rules see no metrics."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What a rule sees at one loop; None in an outage."""

    now: float
    ready: int
    pending_ages: tuple[float, ...]
    waiting_requests: int | None
    waiting_work: float | None
    arrivals_15: float | None
    """Work per second over 15 s."""
    arrivals_60: float | None
    utilisation: float | None
    """Share of the ready capacity that was used in the last loop."""
    wait_seconds: float | None
    """Time the newest request will wait."""


class Rule(Protocol):
    """An autoscaling rule under test."""

    name: str

    def decide(self, seen: Observation) -> int:
        """Replica count wanted now."""
        ...


@dataclass(slots=True)
class Outcome:
    """What a rule achieved."""

    name: str
    finished: int = 0
    within_target: int = 0
    gpu_hours: float = 0.0
    changes: list[tuple[float, int]] = field(default_factory=list)
    """(time, count after) of every change."""
    downs_in_outage: int = 0

    @property
    def share_within_target(self) -> float:
        """Requests that finished their wait and service within the target."""
        return self.within_target / self.finished if self.finished else 1.0

    def count_reversals(self, hours: float, *, window: float = 900.0) -> float:
        """Changes of direction per hour within a quarter of an hour of the change before."""
        reversals = 0
        for (t0, a), (t1, b), (t2, c) in zip(self.changes, self.changes[1:], self.changes[2:], strict=False):
            if (b - a) * (c - b) < 0 and t2 - t1 <= window and t1 >= t0:
                reversals += 1
        return reversals / hours


@dataclass(slots=True)
class _Fleet:
    ready: int
    pending: deque[float] = field(default_factory=deque)
    """Creation times."""

    @property
    def wanted(self) -> int:
        return self.ready + len(self.pending)

    def start_due(self, now: float, load_seconds: float) -> None:
        while self.pending and now - self.pending[0] >= load_seconds:
            self.pending.popleft()
            self.ready += 1

    def scale(self, count: int, now: float) -> None:
        while self.wanted < count:
            self.pending.append(now)
        while self.wanted > count and self.pending:
            self.pending.pop()  # the youngest start is the cheapest to take back
        self.ready -= max(self.wanted - count, 0)


def replay(rule: Rule, arrivals: Sequence[Arrival], setting: Setting) -> Outcome:
    """Run one rule over a trace in steps of one second."""
    fleet = _Fleet(setting.start_replicas)
    outcome = Outcome(rule.name, changes=[(0.0, setting.start_replicas)])
    queue: deque[tuple[float, float]] = deque()  # (arrival time, cumulative work at its end)
    arrived = served = 0.0
    recent: deque[tuple[float, float]] = deque()
    index, now, used = 0, 0.0, 0.0
    end = arrivals[-1].at if arrivals else 0.0
    while now < end or queue:
        now += 1.0
        fresh = 0.0
        while index < len(arrivals) and arrivals[index].at < now:
            work = compute_work(arrivals[index])
            arrived += work
            fresh += work
            queue.append((arrivals[index].at, arrived))
            index += 1
        recent.append((now, fresh))
        while recent[0][0] <= now - 60:
            recent.popleft()
        fleet.start_due(now, setting.load_seconds)
        before = served
        served = min(arrived, served + fleet.ready * setting.capacity)
        used += served - before
        while queue and queue[0][1] <= served + 1e-6:
            outcome.finished += 1
            outcome.within_target += now - queue.popleft()[0] <= setting.target_seconds + 1.0
        outcome.gpu_hours += fleet.wanted / 3600
        if now % setting.loop_seconds == 0:
            _loop(
                rule,
                outcome,
                fleet,
                _observe(now, fleet, queue, arrived - served, recent, used, setting),
                setting,
            )
            used = 0.0
        if now > end + 7200:
            break  # a rule that never serves its queue
    outcome.finished += len(queue)
    return outcome


def _observe(
    now: float,
    fleet: _Fleet,
    queue: deque[tuple[float, float]],
    backlog: float,
    recent: deque[tuple[float, float]],
    used: float,
    setting: Setting,
) -> Observation:
    ages = tuple(now - created for created in fleet.pending)
    if setting.outage is not None and setting.outage[0] <= now < setting.outage[1]:
        return Observation(now, fleet.ready, ages, None, None, None, None, None, None)
    last_15 = sum(work for at, work in recent if at > now - 15) / 15
    power = fleet.ready * setting.capacity
    return Observation(
        now=now,
        ready=fleet.ready,
        pending_ages=ages,
        waiting_requests=len(queue),
        waiting_work=backlog,
        arrivals_15=last_15,
        arrivals_60=sum(work for _, work in recent) / 60,
        utilisation=used / (power * setting.loop_seconds) if power else 1.0,
        wait_seconds=backlog / power if power else float("inf"),
    )


def _loop(rule: Rule, outcome: Outcome, fleet: _Fleet, seen: Observation, setting: Setting) -> None:
    wanted = max(1, min(rule.decide(seen), setting.max_replicas))
    if wanted == fleet.wanted:
        return
    if wanted < fleet.wanted and seen.waiting_work is None:
        outcome.downs_in_outage += 1
    fleet.scale(wanted, seen.now)
    outcome.changes.append((seen.now, wanted))
