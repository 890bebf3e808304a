"""Time from the apply of an InferencePool to its pod's creation, beside a plain Deployment in the same run.

Pools and Deployments of the very same pods take turns on one control plane, one at a time, so both meet the same load.

    python -m benchmarks.operator_latency --json results.json
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, report
from benchmarks.operator_cluster import OperatorProcess, connect, make_namespace, make_pool, use_cluster
from kubernetes import client, watch

GOAL = 2.0
WAIT_SECONDS = 30.0
POOL = ("millpond.dev", "v1alpha1")


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds from the call to the pod, in the order they were taken."""

    first: float
    """Of a namespace's first pool, for which the gateway is made too."""
    pools: list[float]
    deployments: list[float]


class PodWatch:
    """Tells when the first pod of an application appears; one watch serves pools and Deployments alike."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        self._core = client.CoreV1Api(connect(kubeconfig))
        self._namespace = namespace
        self._seen: queue.Queue[tuple[str, float]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def wait(self, prefix: str) -> float:
        """When the first pod whose name starts so appeared (monotonic)."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            name, at = self._seen.get(timeout=max(0.01, deadline - time.monotonic()))
            if name.startswith(prefix):
                return at

    def _run(self) -> None:
        stream = watch.Watch().stream(
            self._core.list_namespaced_pod, self._namespace, resource_version="0", timeout_seconds=3600
        )
        for event in stream:
            if event["type"] == "ADDED":
                self._seen.put((event["object"].metadata.name, time.monotonic()))


def main() -> int:
    """Measure, print, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pools", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    with use_cluster() as kubeconfig, make_namespace(kubeconfig, "latency") as namespace:
        operator = OperatorProcess(kubeconfig, namespace)
        operator.start()
        try:
            times = measure(kubeconfig, namespace, arguments.pools)
        finally:
            operator.stop()
    figures = make_figures(times)
    return report(figures, arguments.json)


def measure(kubeconfig: Path, namespace: str, num: int) -> Times:
    """One pool for the gateway, then pools and Deployments in turn."""
    api = connect(kubeconfig)
    pods = PodWatch(kubeconfig, namespace)
    custom, apps = client.CustomObjectsApi(api), client.AppsV1Api(api)

    def create_pool(name: str) -> None:
        custom.create_namespaced_custom_object(*POOL, namespace, "inferencepools", make_pool(name))

    time.sleep(1.0)
    first = take(create_pool, "first", pods)
    time.sleep(2.0)
    template = find_template(apps, namespace)

    def create_deployment(name: str) -> None:
        apps.create_namespaced_deployment(namespace, make_deployment(name, template))

    take(create_deployment, "warm", pods)
    pools, deployments = [], []
    for number in range(num):
        pools.append(take(create_pool, f"pool-{number}", pods))
        time.sleep(0.5)  # until the pool's other objects and its status are written
        deployments.append(take(create_deployment, f"plain-{number}", pods))
        time.sleep(0.5)
    return Times(first, pools, deployments)


def take(create: Callable[[str], None], name: str, pods: PodWatch) -> float:
    """Seconds from the call to the pod."""
    started = time.monotonic()
    create(name)
    return pods.wait(f"{name}-") - started


def find_template(apps: client.AppsV1Api, namespace: str) -> dict[str, Any]:
    """The pod template of the pool made first, as plain data."""
    found = apps.list_namespaced_deployment(
        namespace, label_selector="millpond.dev/pool=first", _preload_content=False
    )
    return dict(json.loads(found.data)["items"][0]["spec"]["template"])


def make_deployment(name: str, template: dict[str, Any]) -> dict[str, Any]:
    """A Deployment of the same pods under labels of its own."""
    labels = {"app": name}
    metadata = {"labels": labels, "annotations": template["metadata"].get("annotations") or {}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {"metadata": metadata, "spec": template["spec"]},
        },
    }


def make_figures(times: Times) -> list[Figure]:
    """Medians, the ratio against its goal, and what has no goal."""
    pool, plain = statistics.median(times.pools) * 1000, statistics.median(times.deployments) * 1000
    slow = statistics.quantiles(times.pools, n=10)[-1] * 1000
    ratio = pool / plain
    return [
        Figure(
            "pool_to_pod_median", pool, "ms", peer=plain, ratio=ratio, goal=f"<= {GOAL:g}x", met=ratio <= GOAL
        ),
        Figure("pool_to_pod_p90", slow, "ms"),
        Figure(
            "first_pool_of_namespace_to_pod",
            times.first * 1000,
            "ms",
            peer=plain,
            ratio=times.first * 1000 / plain,
        ),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
