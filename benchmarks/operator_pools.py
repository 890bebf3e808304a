"""One operator with a thousand pools: time to converge, memory, calls and CPU while idle, and a restart.

Pools, their Deployments and pods are real objects of a real control plane; kubelet, gateways and engines are fakes that
answer at once, so what is measured is the operator (and, in the time to converge, the control plane).

    python -m benchmarks.operator_pools --pools 1000 --json results.json
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, report
from benchmarks.operator_cluster import (
    OperatorProcess,
    connect,
    make_namespace,
    make_pool,
    read_control_plane_cpu,
    use_cluster,
)
from benchmarks.operator_world import FakeNode, serve_gateways
from kubernetes import client

PLURAL = ("millpond.dev", "v1alpha1")
MEMORY_GOAL = 512.0
CALLS_GOAL = 1.0
_CREATORS = 4
_SETTLED = (("True", "Answering"), ("False", "ScaledToZero"))
_WRITES = ("apply", "create", "patch", "delete", "update")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was measured."""

    num_pools: int
    converge_seconds: float
    """From the first pool's creation until all are Ready (or at zero replicas, where that is asked)."""
    restart_seconds: float
    """From a new process until every pool was looked at."""
    restart_writes: int
    calls_per_pool: float
    """To the API server, until all were settled."""
    cpu_per_pool: float
    """Seconds of the operator, until all were settled."""
    calls_per_pool_minute: float
    idle_cpu_percent: float
    """Of one core."""
    memory: float
    peak_memory: float
    """MiB, of both processes."""


def main() -> int:
    """Measure, print, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pools", type=int, default=1000)
    parser.add_argument("--zeros", type=int, default=0, help="how many of them have no replica")
    parser.add_argument("--namespaces", type=int, default=10)
    parser.add_argument("--idle-seconds", type=float, default=60.0)
    parser.add_argument("--limit-seconds", type=float, default=280.0, help="for the pools to settle")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    with use_cluster() as kubeconfig, contextlib.ExitStack() as stack:
        names = [f"pools-{number}" for number in range(arguments.namespaces)]
        for name in ("operator", *names):
            stack.enter_context(make_namespace(kubeconfig, name))
        node = FakeNode(kubeconfig)
        node.start()
        serve_gateways(node)
        outcome = measure(kubeconfig, names, arguments)
    figures = make_figures(outcome)
    return report(figures, arguments.json)


def measure(kubeconfig: Path, namespaces: list[str], arguments: argparse.Namespace) -> Outcome:
    """Create, settle, idle, restart."""
    num = arguments.pools
    with run_operator(kubeconfig) as first:
        started = time.monotonic()
        create_pools(kubeconfig, namespaces, num, arguments.zeros)
        print(f"{num} pools created after {time.monotonic() - started:.0f} s", flush=True)
        wait_until_settled(kubeconfig, num, first, arguments.limit_seconds)
        converged = time.monotonic() - started
        print(f"all settled after {converged:.0f} s", flush=True)
        spent = {"calls": count_calls(first), "cpu": first.read_cpu_seconds()}
        report_cpu(converged, spent["cpu"])
        for (verb, kind), count in sorted(first.count_calls().items(), key=lambda entry: -entry[1])[:16]:
            print(f"  {verb:7} {kind:24} {count / num:6.2f} calls a pool")
        time.sleep(15)
        calls, cpu = measure_idle(first, arguments.idle_seconds)
        memory, peak = first.read_memory()
    started = time.monotonic()
    with run_operator(kubeconfig) as second:
        while read_reconciles(second) < num:
            time.sleep(0.2)
        restarted = time.monotonic() - started
        time.sleep(10)
        writes = sum(
            n for (verb, kind), n in second.count_calls().items() if verb in _WRITES and kind != "Lease"
        )
        peak = max(peak, second.read_memory()[1])
    return Outcome(
        num_pools=num,
        converge_seconds=converged,
        restart_seconds=restarted,
        restart_writes=writes,
        calls_per_pool=spent["calls"] / num,
        cpu_per_pool=spent["cpu"] / num,
        calls_per_pool_minute=calls / num / (arguments.idle_seconds / 60),
        idle_cpu_percent=100 * cpu / arguments.idle_seconds,
        memory=memory,
        peak_memory=peak,
    )


@contextlib.contextmanager
def run_operator(kubeconfig: Path) -> Iterator[OperatorProcess]:
    """An operator for the time of the block."""
    operator = OperatorProcess(kubeconfig, "operator", ("--gateway-replicas", "1"))
    operator.start()
    try:
        yield operator
    finally:
        operator.stop()


def create_pools(kubeconfig: Path, namespaces: list[str], num: int, zeros: int) -> None:
    """Create them as fast as the API server takes them, the namespaces in turn."""
    api = client.CustomObjectsApi(connect(kubeconfig))

    def create(number: int) -> None:
        body: dict[str, Any] = make_pool(f"pool-{number}", replicas=int(number >= zeros))
        namespace = namespaces[number % len(namespaces)]
        api.create_namespaced_custom_object(
            *PLURAL, namespace, "inferencepools", body, _preload_content=False
        )

    with ThreadPoolExecutor(_CREATORS) as creators:
        list(creators.map(create, range(num)))


def wait_until_settled(kubeconfig: Path, num: int, operator: OperatorProcess, limit: float) -> None:
    """Wait until every pool is as it should be."""
    api = client.CustomObjectsApi(connect(kubeconfig))
    deadline = time.monotonic() + limit
    while (settled := count_settled(api)) < num:
        if time.monotonic() > deadline:
            report_cpu(limit, operator.read_cpu_seconds())
            raise SystemExit(
                f"{settled} of {num} pools are settled after {limit:.0f} s; {operator.read_memory()[0]:.0f} MiB"
            )
        time.sleep(4.0)  # a list of a thousand pools is work for the API server too


def report_cpu(seconds: float, operator: float) -> None:
    """Who had the processor until now, on average, in cores."""
    spent = {**read_control_plane_cpu(), "operator": operator, "fakes and client": time.process_time()}
    print("cores: " + ", ".join(f"{name} {cpu / seconds:.2f}" for name, cpu in spent.items()), flush=True)


def count_settled(api: client.CustomObjectsApi) -> int:
    """Pools that are as they should be: Ready, or without a replica."""
    items = api.list_cluster_custom_object(*PLURAL, "inferencepools")["items"]
    conditions = [c for item in items for c in (item.get("status") or {}).get("conditions") or ()]
    return sum(1 for c in conditions if c["type"] == "Ready" and (c["status"], c["reason"]) in _SETTLED)


def measure_idle(operator: OperatorProcess, seconds: float) -> tuple[int, float]:
    """Calls to the API server besides the Lease's, and CPU seconds, while nothing happens."""
    before, cpu = count_calls(operator), operator.read_cpu_seconds()
    time.sleep(seconds)
    return count_calls(operator) - before, operator.read_cpu_seconds() - cpu


def count_calls(operator: OperatorProcess) -> int:
    """All calls so far; the Lease's do not depend on the number of pools."""
    return sum(n for (_, kind), n in operator.count_calls().items() if kind != "Lease")


def read_reconciles(operator: OperatorProcess) -> int:
    """Reconciles that have ended well."""
    with contextlib.suppress(OSError):
        return int(operator.read_metrics().get(("millpond_operator_reconciles_total", "Done"), 0))
    return 0


def make_figures(outcome: Outcome) -> list[Figure]:
    """The figures with their goals."""
    num, calls, peak = outcome.num_pools, outcome.calls_per_pool_minute, outcome.peak_memory
    return [
        Figure("operator_peak_memory", peak, "MiB", goal=f"<= {MEMORY_GOAL:g}", met=peak <= MEMORY_GOAL),
        Figure("operator_idle_memory", outcome.memory, "MiB"),
        Figure(
            "calls_per_idle_pool_and_minute", calls, "1", goal=f"<= {CALLS_GOAL:g}", met=calls <= CALLS_GOAL
        ),
        Figure("idle_cpu", outcome.idle_cpu_percent, "% of a core"),
        Figure("create_to_all_settled", outcome.converge_seconds, "s"),
        Figure("create_to_all_settled_per_pool", outcome.converge_seconds / num * 1000, "ms"),
        Figure("calls_per_pool_until_settled", outcome.calls_per_pool, "1"),
        Figure("cpu_per_pool_until_settled", outcome.cpu_per_pool * 1000, "ms"),
        Figure("restart_to_all_looked_at", outcome.restart_seconds, "s"),
        Figure(
            "writes_after_restart", outcome.restart_writes, "1", goal="0", met=outcome.restart_writes == 0
        ),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
