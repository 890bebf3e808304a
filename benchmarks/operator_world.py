"""Kubelet, gateways and engines for the operator's benchmarks: pods run at once, and their ports answer on loopback.

Each pod gets an address of 127/8, so the operator calls it as it calls real pods.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.operator_cluster import connect
from kubernetes import client, watch

from millpond_common.contract import labels, ports
from millpond_common.contract.engine_state import BlockCounts, EngineState, Speeds
from millpond_common.contract.gateway_report import EndpointReport, GatewayReport, PoolReport, ProbeResult

NODE = "benchmark"
HEARTBEAT_SECONDS = 10.0
_PARALLEL = 4


class FakeNode:
    """A node object whose pods become ready as soon as they are seen."""

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig
        self._core = client.CoreV1Api(connect(kubeconfig))
        self._pool = ThreadPoolExecutor(_PARALLEL)
        self._addresses = itertools.count(1)
        self._lock = threading.Lock()
        self.pods: dict[str, dict[str, Any]] = {}
        """Running pods by UID, with the address they were given."""

    def start(self) -> None:
        """Make the node and tend every pod of the cluster from now on."""
        taint = {"key": labels.GROUP + "/benchmark", "effect": "NoSchedule"}
        self._core.create_node({"metadata": {"name": NODE}, "spec": {"taints": [taint]}})
        for target in (self._watch, self._beat):
            threading.Thread(target=target, daemon=True).start()

    def list_of_namespace(self, address: str) -> list[dict[str, Any]]:
        """Engine pods of the namespace in which the pod with the address runs."""
        with self._lock:
            pods = list(self.pods.values())
        home = {p["namespace"] for p in pods if p["address"] == address}
        return [p for p in pods if p["namespace"] in home and labels.POOL in p["labels"]]

    def _watch(self) -> None:
        core = client.CoreV1Api(connect(self._kubeconfig))
        # Plain objects: models of a thousand pods would cost more than all that is measured.
        stream = watch.Watch(return_type="object").stream(
            core.list_pod_for_all_namespaces, resource_version="0", timeout_seconds=3600
        )
        for event in stream:
            uid = event["raw_object"]["metadata"]["uid"]
            if event["type"] == "DELETED":
                with self._lock:
                    self.pods.pop(uid, None)
            elif event["type"] == "ADDED":
                self._pool.submit(self._run, event["raw_object"])

    def _run(self, pod: dict[str, Any]) -> None:
        metadata = pod["metadata"]
        name, namespace = metadata["name"], metadata["namespace"]
        number = next(self._addresses)
        address = f"127.{100 + number // 62500}.{number // 250 % 250}.{number % 250 + 1}"
        target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
        self._core.create_namespaced_pod_binding(name, namespace, body, _preload_content=False)
        status = make_status(pod, address)
        self._core.patch_namespaced_pod_status(name, namespace, {"status": status}, _preload_content=False)
        known = {
            "name": name,
            "uid": metadata["uid"],
            "namespace": namespace,
            "address": address,
            "labels": metadata.get("labels") or {},
        }
        with self._lock:
            self.pods[metadata["uid"]] = known

    def _beat(self) -> None:
        """Without a heartbeat the node's pods would be evicted after some minutes."""
        while True:
            condition = {"type": "Ready", "status": "True", "lastHeartbeatTime": make_stamp()}
            self._core.patch_node_status(NODE, {"status": {"conditions": [condition]}})
            time.sleep(HEARTBEAT_SECONDS)


def make_stamp() -> str:
    """Now, as Kubernetes writes times."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def make_status(pod: dict[str, Any], address: str) -> dict[str, Any]:
    """Of a pod all of whose containers run and are ready."""
    containers = [
        {
            "name": c["name"],
            "image": c["image"],
            "imageID": "",
            "ready": True,
            "restartCount": 0,
            "state": {"running": {"startedAt": make_stamp()}},
        }
        for c in pod["spec"]["containers"]
    ]
    conditions = [
        {"type": kind, "status": "True", "lastTransitionTime": make_stamp()}
        for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
    ]
    return {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "conditions": conditions,
        "containerStatuses": containers,
    }


def serve_gateways(node: FakeNode) -> None:
    """Answer on the gateways' admin port and on the engines' port of every loopback address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            address = self.headers["host"].partition(":")[0]
            if self.path == "/v1/state":
                self._answer(_IDLE_STATE)
                return
            self._answer(msgspec.json.encode(make_report(address, node.list_of_namespace(address))))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            ok = body["podUid"] in node.pods
            self._answer(msgspec.json.encode(ProbeResult(ok, 200 if ok else 404, "", 0.001)))

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """No line per call."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, request: Any, client_address: Any) -> None:
            """The operator may end while a connection is open."""

    for port in (ports.GATEWAY_ADMIN, ports.ENGINE_HTTP):
        server = Server(("0.0.0.0", port), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()


_IDLE_BLOCKS = BlockCounts(free=1000, cached=0, in_use=0)
_IDLE_STATE = msgspec.json.encode(
    EngineState(
        epoch="0" * 16,
        model="tiny",
        phase="Ready",
        uptime_seconds=1000.0,
        version="benchmark",
        block_tokens=16,
        device=_IDLE_BLOCKS,
        host=_IDLE_BLOCKS,
        max_model_tokens=8192,
        num_running=0,
        num_waiting=0,
        running_tokens=0,
        waiting_tokens=0,
        open_requests=0,
        cached_value_tokens=0,
        speeds=Speeds(prefill_tokens_per_second=1000.0),
    )
)


def make_report(address: str, pods: list[dict[str, Any]]) -> GatewayReport:
    """What an idle gateway says that routes to every engine of its namespace."""
    pools: dict[str, list[EndpointReport]] = {}
    for pod in pods:
        own = pod["labels"]
        endpoint = EndpointReport(pod["name"], pod["uid"], own[labels.REVISION], own[labels.ROLE], True, 0, 0)
        pools.setdefault(own[labels.POOL], []).append(endpoint)
    reports = tuple(
        PoolReport(
            name,
            tuple(found),
            uncached_tokens_per_second_15=0.0,
            uncached_tokens_per_second_60=0.0,
            output_tokens_per_second_60=0.0,
        )
        for name, found in sorted(pools.items())
    )
    return GatewayReport(address, "1", time.time(), 0.0, True, reports)
