"""A pool under the autoscaler in virtual time: decisions become pods, pods become ready, and the test steers the load."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from tests.support.engine_states import make_engine_state
from tests.support.operator_builders import make_container, make_pod, make_pool

from millpond_common.contract.gateway_report import EndpointReport, PoolReport
from millpond_operator.api.pool import InferencePool, list_roles
from millpond_operator.plan.autoscale import Judged, ScalingView, judge_scaling
from millpond_operator.plan.snapshot import Pod, PoolSnapshot, Workload
from millpond_operator.scaling.aggregate import EngineSample, GatewaySample
from millpond_operator.scaling.memory import Memory
from millpond_operator.scaling.starts import Start

EPOCH = 1_800_000_000.0
CAPACITY = 1_000.0
"""Uncached tokens per second that each engine measured."""


def make_report(*pods: Pod, rate: float | None = 0.0, **changes: Any) -> PoolReport:
    """What one gateway says: it routes to the pods, and the rate is that of both windows."""
    endpoints = tuple(
        EndpointReport(pod.name, pod.uid, pod.revision, pod.role, pod.serving, 0, 0) for pod in pods
    )
    values: dict[str, Any] = {
        "uncached_tokens_per_second_15": rate,
        "uncached_tokens_per_second_60": rate,
        "output_tokens_per_second_60": 0.0,
        "last_request_seconds_ago": 0.0,
    }
    return PoolReport("smol", endpoints, **(values | changes))


@dataclass
class ScaledPool:
    """One pool, two gateways, and the clock."""

    scaling: dict[str, Any]
    count: int = 1
    start_seconds: float = 60.0
    """From creation to readiness; a pod in `stuck` never gets there."""
    interval: float = 15.0
    now: float = EPOCH
    rate: float | None = 0.0
    report: dict[str, Any] = field(default_factory=dict)
    """Further fields of the gateways' reports, whose sum counts where there are sums."""
    state: dict[str, Any] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    """Pods whose engine does not answer."""
    stuck: set[str] = field(default_factory=set)
    hit_rates: dict[str, float] = field(default_factory=dict)
    """Prompt tokens per second that each replica finds in its cache; the others count none."""
    node_kinds: dict[str, str] = field(default_factory=dict)
    other_starts: tuple[Start, ...] = ()
    num_gateways: int = 2
    num_answering: int = 2
    memory: Memory = field(default_factory=Memory)
    history: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin with replicas that have been ready for an hour."""
        self._number = 0
        self._pods: list[Pod] = []
        self._follow()
        self._pods = [
            replace(p, ready=True, created_at=EPOCH - 3600, ready_since=EPOCH - 3540) for p in self._pods
        ]

    @property
    def pods(self) -> list[Pod]:
        """Pods that are there."""
        return list(self._pods)

    @property
    def pool(self) -> InferencePool:
        """The pool with the count decided last."""
        status = {"desiredReplicas": self.count, "roles": [{"name": "Both"}]}
        return make_pool(scaling=self.scaling, status=status)

    def take_snapshot(self) -> PoolSnapshot:
        """What the operator sees now."""
        workload = Workload(
            "w", "u", "both", "r", self.count, "millpond-operator", 1, 1, EPOCH, deleting=False
        )
        return PoolSnapshot(self.pool, self.now, workloads=(workload,), pods=tuple(self._pods))

    def view(self) -> ScalingView:
        """What gateways and engines answer now; the first gateway sees all the load."""
        busy = make_report(*self._pods, rate=self.rate, **self.report)
        rates = None if self.rate is None else 0.0
        idle = make_report(*self._pods, rate=rates, last_request_seconds_ago=busy.last_request_seconds_ago)
        gateways = [
            GatewaySample(f"g{n}", self.now, busy if n == 0 else idle) for n in range(self.num_answering)
        ]
        engines = [
            EngineSample(pod.uid, self.now, make_engine_state(**self._count_hits(pod), **self.state))
            for pod in self._pods
            if pod.ready and pod.name not in self.silent
        ]
        return ScalingView(
            tuple(gateways),
            self.num_gateways,
            tuple(engines),
            interval_seconds=self.interval,
            node_kinds=self.node_kinds,
            other_starts=self.other_starts,
        )

    def _count_hits(self, pod: Pod) -> dict[str, int]:
        """Prefix hits since the beginning, where some replica counts them."""
        rate = self.hit_rates.get(pod.name, 0.0)
        return {"prefix_hit_tokens": round(rate * (self.now - EPOCH))} if self.hit_rates else {}

    def step(self) -> Judged:
        """One loop: look, decide, and let the cluster follow at once."""
        self.now += self.interval
        self._mature()
        judged = judge_scaling(
            self.take_snapshot(), list_roles(self.pool)[0], self.view(), self.memory, self.now
        )
        self.memory, self.count = judged.memory, judged.decision.replicas
        self.history.append(self.count)
        self._follow()
        return judged

    def run(self, seconds: float) -> list[int]:
        """Loop for a while; returns the counts decided."""
        return [self.step().decision.replicas for _ in range(round(seconds / self.interval))]

    def _mature(self) -> None:
        self._pods = [
            replace(pod, ready=True, ready_since=pod.created_at + self.start_seconds)
            if not pod.ready
            and pod.name not in self.stuck
            and self.now - pod.created_at >= self.start_seconds
            else pod
            for pod in self._pods
        ]

    def _follow(self) -> None:
        while len(self._pods) < self.count:
            self._number += 1
            name = f"p{self._number}"
            loads = (make_container(),) if name not in self.stuck else ()
            pod = make_pod(name, ready=False, ready_since=None, created_at=self.now, containers=loads)
            self._pods.append(pod)
        leaving = sorted(self._pods, key=lambda pod: (pod.ready, -pod.created_at))
        gone = {pod.name for pod in leaving[: len(self._pods) - self.count]}
        self._pods = [pod for pod in self._pods if pod.name not in gone]
