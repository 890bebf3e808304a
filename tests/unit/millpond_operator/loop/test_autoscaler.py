"""The scaling loop without a cluster: what it asks, keeps and hands on."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.support.engine_states import make_engine_state
from tests.support.operator_builders import SETTINGS, make_pod, make_pool, make_snapshot
from tests.support.scaled_pool import make_report

from millpond_common.contract.engine_state import EngineState
from millpond_common.contract.gateway_report import GatewayReport, PoolReport
from millpond_operator.api.status import dump_status
from millpond_operator.desired.kinds import NODE, Kind
from millpond_operator.errors import GatewayCallError
from millpond_operator.loop.autoscaler import Autoscaler, ScalingSettings
from millpond_operator.loop.scaling_metrics import ScalingMetrics
from millpond_operator.observe.node_kinds import NodeKinds
from millpond_operator.observe.reports import ReportCache
from millpond_operator.plan.planner import plan
from millpond_operator.plan.snapshot import Pod, PoolSnapshot, Workload

SCALING = {"minReplicas": 1, "maxReplicas": 8}
GATEWAY = make_pod("gateway", role="", address="10.0.1.1")


@dataclass
class Listed:
    items: list[dict[str, Any]]


@dataclass
class Fleet:
    """Pools, gateways and engines; stands for observer and callers."""

    pools: dict[str, PoolSnapshot] = field(default_factory=dict)
    reports: dict[str, PoolReport] = field(default_factory=dict)
    failure: str | None = None
    asked: list[str] = field(default_factory=list)
    marked: list[str] = field(default_factory=list)
    leads: bool = True
    rivals: dict[str, tuple[str, ...]] = field(default_factory=dict)
    node_lists: int = 0
    changes: int = 0
    """Grows with every change of a pool."""
    looks: Counter[str] = field(default_factory=Counter)
    report_calls: int = 0
    stock_reads: int = 0

    def add(self, name: str, count: int, rate: float, **spec: Any) -> None:
        base = make_pool(metadata={"name": name, "uid": f"uid-{name}"},
                         status={"desiredReplicas": count, "roles": [{"name": "Both"}]}, **spec)  # fmt: skip
        pods = tuple(make_pod(f"{name}-{n}") for n in range(count))
        workload = Workload("w", "u", "both", "r", count, "millpond-operator", 1, 1, 0.0, deleting=False)
        self.pools[name] = make_snapshot(base, pods=pods, workloads=(workload,))
        self.changes += 1
        self.offer(name, rate)

    def offer(self, name: str, rate: float, **changes: Any) -> None:
        report = make_report(*self.pools[name].pods, rate=rate, **changes)
        self.reports[name] = PoolReport(
            **{f: getattr(report, f) for f in report.__struct_fields__} | {"pool": name}
        )

    def get_raw(self, namespace: str, name: str) -> dict[str, Any] | None:
        self.stock_reads += 1
        found = self.pools.get(name)
        if found is None:
            return None
        return {"metadata": {"uid": found.pool.metadata.uid, "generation": found.pool.metadata.generation}}

    def look(self, namespace: str, name: str, now: float) -> PoolSnapshot | None:
        self.looks[name] += 1
        if name == "broken":
            raise AssertionError("a bug")
        return self.pools.get(name)

    def list_gateway_pods(self, namespace: str) -> list[Pod]:
        return [GATEWAY]

    async def fetch_report(self, address: str) -> GatewayReport:
        self.report_calls += 1
        if self.failure is not None:
            raise GatewayCallError(self.failure)
        return GatewayReport("g", "1", 0.0, 0.0, synced=True, pools=tuple(self.reports.values()))

    def get_names(self, namespace: str, pool: str) -> tuple[str, ...]:
        return self.rivals.get(pool, ())

    async def refresh(self, namespace: str) -> None:
        self.rivals = {"pool": ("theirs",)}

    async def list(self, kind: Kind, namespace: str | None) -> Listed:
        assert kind is NODE
        self.node_lists += 1
        labels = {"node.kubernetes.io/instance-type": "a3"}
        return Listed([{"metadata": {"name": "node-1", "labels": labels}}])

    async def fetch_state(self, address: str) -> EngineState:
        self.asked.append(address)
        return make_engine_state()


def make_autoscaler(fleet: Fleet, registry: CollectorRegistry | None = None, **times: float) -> Autoscaler:
    settings = ScalingSettings(**({"interval": 0.1, "wake_interval": 0.02} | times))
    return Autoscaler(
        fleet,  # type: ignore[arg-type]
        reports=ReportCache(fleet, time.monotonic),  # type: ignore[arg-type]
        engines=fleet,
        scalers=fleet,  # type: ignore[arg-type]
        node_kinds=NodeKinds(fleet, time.monotonic, enabled=True),  # type: ignore[arg-type]
        metrics=ScalingMetrics(registry or CollectorRegistry()),
        list_pools=lambda: [("ns", name) for name in fleet.pools],
        count_changes=lambda: fleet.changes,
        mark=lambda _, name: fleet.marked.append(name),
        is_leader=lambda: fleet.leads,
        settings=settings,
    )


async def run_for(autoscaler: Autoscaler, seconds: float) -> None:
    task = asyncio.create_task(autoscaler.run())
    await asyncio.sleep(seconds)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def run_until(autoscaler: Autoscaler, done: Callable[[], bool]) -> None:
    """Run until something holds; a busy machine takes its time."""
    task = asyncio.create_task(autoscaler.run())
    async with asyncio.timeout(30):
        while not done():
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def get_count(autoscaler: Autoscaler, fleet: Fleet, name: str) -> int:
    return autoscaler.decide(fleet.pools[name], 0.0)["Both"].replicas


def list_series(registry: CollectorRegistry) -> dict[str, float]:
    return {
        f"{sample.name}{{{sample.labels['pool']}}}": sample.value
        for family in registry.collect()
        for sample in family.samples
    }


async def test_op_052_two_pools_with_different_targets_are_independent() -> None:
    fleet, registry = Fleet(), CollectorRegistry()
    fleet.add("small", 1, 3_000.0, scaling=SCALING | {"maxReplicas": 2})
    fleet.add("large", 1, 3_000.0, scaling=SCALING)
    fleet.add("theirs", 2, 400.0, replicas=2)
    autoscaler = make_autoscaler(fleet, registry)
    demand = "millpond_operator_scaling_demand_tokens_per_second{theirs}"
    await run_until(
        autoscaler, lambda: {"small", "large"} <= set(fleet.marked) and demand in list_series(registry)
    )
    assert (get_count(autoscaler, fleet, "small"), get_count(autoscaler, fleet, "large")) == (2, 4)
    assert autoscaler.decide(fleet.pools["theirs"], 0.0) == {}
    series = list_series(registry)
    assert series[demand] == 400.0
    assert series["millpond_operator_scaling_recommendation_replicas{theirs}"] == 1
    assert "theirs" not in fleet.marked, "a pool whose count somebody else owns is measured and left alone"
    reborn = make_pool(metadata={"name": "small", "uid": "another"}, scaling=SCALING)
    assert autoscaler.decide(make_snapshot(reborn), 0.0) == {}


async def test_op_005_limits_that_change_count_at_once() -> None:
    fleet = Fleet()
    fleet.add("pool", 1, 3_000.0, scaling=SCALING)
    autoscaler = make_autoscaler(fleet, interval=60.0)
    await run_until(autoscaler, lambda: "pool" in fleet.marked)
    assert get_count(autoscaler, fleet, "pool") == 4
    for limits, count in (
        ({"minReplicas": 6, "maxReplicas": 8}, 6),
        ({"minReplicas": 1, "maxReplicas": 3}, 3),
    ):
        changed = make_pool(metadata={"uid": "uid-pool"}, scaling=limits)
        assert autoscaler.decide(make_snapshot(changed), 0.0)["Both"].replicas == count


async def test_the_bug_of_one_pool_does_not_stop_the_others() -> None:
    fleet = Fleet()
    fleet.add("broken", 1, 0.0, scaling=SCALING)
    fleet.add("fine", 1, 1_500.0, scaling=SCALING)
    autoscaler = make_autoscaler(fleet, interval=60.0)
    await run_until(autoscaler, lambda: "fine" in fleet.marked)
    assert get_count(autoscaler, fleet, "fine") == 2


async def test_op_063_a_failed_call_is_bridged_for_two_intervals_and_then_named() -> None:
    fleet, registry = Fleet(), CollectorRegistry()
    fleet.add("pool", 1, 1_500.0, scaling=SCALING)
    autoscaler = make_autoscaler(fleet, registry, interval=1.0, wake_interval=0.05)

    def is_active() -> bool | None:
        return autoscaler.decide(fleet.pools["pool"], 0.0)["Both"].judgements[0].status

    await run_until(autoscaler, lambda: "pool" in fleet.marked)
    fleet.failure = "GET http://gateway.invalid:8081/v1/report: name does not resolve"
    began = time.monotonic()
    assert is_active()
    await run_until(autoscaler, lambda: not is_active())
    assert time.monotonic() - began > 1.0, "one failed look is bridged"
    decision = autoscaler.decide(fleet.pools["pool"], 0.0)["Both"]
    assert (decision.judgements[0].status, decision.replicas) == (False, 1)
    assert "gateway.invalid:8081" in decision.judgements[0].message
    series = list_series(registry)
    assert "millpond_operator_scaling_demand_tokens_per_second{pool}" not in series, "absent, not zero"
    assert series["millpond_operator_scaling_active{pool}"] == 0


async def test_a_pool_at_zero_is_looked_at_often_and_its_engines_never() -> None:
    fleet = Fleet()
    zero = SCALING | {"minReplicas": 0, "coldStartHoldSeconds": 60}
    fleet.add("pool", 0, 0.0, scaling=zero)
    fleet.offer("pool", 0.0, last_request_seconds_ago=None)
    autoscaler = make_autoscaler(fleet, interval=60.0, wake_interval=0.05)
    await run_until(autoscaler, lambda: "pool" in fleet.marked)
    assert get_count(autoscaler, fleet, "pool") == 0
    fleet.offer("pool", 0.0, held_requests=1)
    await run_until(autoscaler, lambda: get_count(autoscaler, fleet, "pool") == 1)
    assert fleet.asked == []


async def test_an_instance_that_does_not_lead_asks_nobody_and_forgets() -> None:
    fleet, registry = Fleet(), CollectorRegistry()
    fleet.add("pool", 1, 1_500.0, scaling=SCALING)
    autoscaler = make_autoscaler(fleet, registry)
    await run_until(autoscaler, lambda: "pool" in fleet.marked)
    assert fleet.asked
    fleet.leads = False
    fleet.asked.clear()
    await run_for(autoscaler, 0.2)
    assert fleet.asked == []
    assert autoscaler.decide(fleet.pools["pool"], 0.0) == {}
    assert list_series(registry) == {}


async def test_op_068_before_the_first_look_the_status_speaks() -> None:
    fleet = Fleet()
    fleet.add("pool", 1, 3_000.0, scaling=SCALING)
    autoscaler = make_autoscaler(fleet)
    await run_until(autoscaler, lambda: "pool" in fleet.marked)
    snapshot = fleet.pools["pool"]
    planned = plan(snapshot, SETTINGS, 0.0, autoscaler.decide(snapshot, 0.0))
    assert planned.status is not None
    left = make_pool(metadata={"uid": "uid-pool"}, status=dump_status(planned.status), scaling=SCALING)
    fresh = make_autoscaler(fleet)
    (decision,) = fresh.decide(replace(snapshot, pool=left), 0.0).values()
    assert decision.replicas == 4
    assert decision.status == planned.status.scaling
    assert decision.judgements[0].status is True


async def test_as_021_pools_of_one_model_share_their_start_times_by_kind_of_node() -> None:
    fleet = Fleet()
    fleet.add("known", 5, 100.0, scaling=SCALING)
    fleet.add("fresh", 0, 0.0, scaling=SCALING | {"minReplicas": 0, "coldStartHoldSeconds": 60})
    fleet.offer("fresh", 0.0, held_requests=1)
    autoscaler = make_autoscaler(fleet, interval=0.2)

    def get_start(name: str) -> int | None:
        made = autoscaler.decide(fleet.pools[name], 0.0)
        status = made["Both"].status if made else None
        return status.start_seconds if status is not None else None

    await run_until(autoscaler, lambda: get_start("fresh") is not None)
    assert get_start("known") == get_start("fresh") == 50, "as long as the known pool's replicas took"
    status = autoscaler.decide(fleet.pools["known"], 0.0)["Both"].status
    assert status is not None
    assert [(s.node_kind, s.num_starts) for s in status.start_times] == [("a3", 5)]
    assert fleet.node_lists == 1, "listed once, since no other node was met"


async def test_pools_at_rest_cost_no_look_and_no_call() -> None:
    fleet = Fleet()
    for number in range(20):
        fleet.add(f"fixed-{number}", number % 2, 0.0, replicas=number % 2)
        quiet = {"last_request_seconds_ago": None, "output_tokens_per_second_60": 0.0}
        fleet.offer(f"fixed-{number}", 0.0, **quiet)
    autoscaler = make_autoscaler(fleet, interval=60.0, wake_interval=0.02)
    await run_until(autoscaler, lambda: len(fleet.looks) == 20)
    seen = fleet.looks.copy(), fleet.report_calls, len(fleet.asked), fleet.stock_reads
    await run_for(autoscaler, 0.3)
    assert (fleet.looks, fleet.report_calls, len(fleet.asked), fleet.stock_reads) == seen


async def test_one_report_serves_all_pools_at_zero_and_wakes_only_the_wanted_one() -> None:
    fleet = Fleet()
    zero = SCALING | {"minReplicas": 0, "coldStartHoldSeconds": 60}
    for number in range(20):
        fleet.add(f"pool-{number}", 0, 0.0, scaling=zero)
        fleet.offer(f"pool-{number}", 0.0, last_request_seconds_ago=None)
    autoscaler = make_autoscaler(fleet, interval=60.0, wake_interval=0.1)
    await run_until(autoscaler, lambda: len(set(fleet.marked)) == 20)
    looks, calls = fleet.looks.copy(), fleet.report_calls
    await run_until(autoscaler, lambda: fleet.report_calls >= calls + 3)
    assert fleet.looks == looks, "nobody wants them, so none is looked at"
    fleet.offer("pool-7", 0.0, held_requests=1)
    await run_until(autoscaler, lambda: get_count(autoscaler, fleet, "pool-7") == 1)
    assert fleet.looks - looks == {"pool-7": fleet.looks["pool-7"] - looks["pool-7"]}


async def test_a_changed_pool_is_looked_at_at_once_and_the_others_are_not() -> None:
    fleet = Fleet()
    fleet.add("one", 1, 100.0, scaling=SCALING)
    fleet.add("two", 1, 100.0, scaling=SCALING)
    autoscaler = make_autoscaler(fleet, interval=60.0)
    await run_until(autoscaler, lambda: {"one", "two"} <= set(fleet.marked))
    before = fleet.looks.copy()
    changed = make_pool(metadata={"name": "one", "uid": "uid-one", "generation": 2}, scaling=SCALING)
    fleet.pools["one"] = replace(fleet.pools["one"], pool=changed)
    fleet.changes += 1
    await run_until(autoscaler, lambda: fleet.looks["one"] > before["one"])
    assert fleet.looks["two"] == before["two"]
