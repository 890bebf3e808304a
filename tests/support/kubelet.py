"""A kubelet's part for a control plane without a node: binds pods, reports their containers, ends deleted ones.

It works in one namespace, on a node object of its own that takes no other pods. What a pod should do is a function of the
test; without one, every pod runs and is ready at once.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from kubernetes import client
from kubernetes.client.exceptions import ApiException
from tests.support.kube import Kube
from urllib3.exceptions import HTTPError

Manifest = dict[str, Any]
POLL_SECONDS = 0.05
HEARTBEAT_SECONDS = 10.0
_addresses = itertools.count(1)


@dataclass
class Behaviour:
    """What one pod does. Times count from when it was bound."""

    schedules: bool = True
    ready_after_seconds: float | None = 0.0
    """None: it never gets ready."""
    drain_seconds: float = 0.0
    waiting: Manifest | None = None
    """Of the engine container: {"reason": …, "message": …}."""
    terminated: Manifest | None = None
    """The engine container's last end: {"exitCode": …, "reason": …, "message": …}."""
    init_terminated: Manifest | None = None
    """The first init container's last end; while set, the pod does not get past it."""
    restarts: int = 0
    init_message: str = ""
    """Termination message of the first init container where it ends well."""


@dataclass
class _Seen:
    bound_at: float
    address: str
    deleted_at: float | None = None
    stamp: str = ""
    """When its readiness changed last."""
    was_ready: bool = False
    reported: Manifest = field(default_factory=dict)


class FakeKubelet:
    """Runs in a thread until stopped."""

    def __init__(self, kube: Kube, *, behave: Callable[[Manifest], Behaviour] | None = None) -> None:
        self._kube = kube
        self.behave = behave or (lambda _pod: Behaviour())
        self.node = f"fake-{kube.namespace}"
        self._seen: dict[str, _Seen] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fake kubelet", daemon=True)
        self.pods: list[Manifest] = []
        self.errors: list[str] = []

    def start(self) -> None:
        """Make the node and begin."""
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self.node, "labels": {"millpond.dev/test-node": "true"}},
            "spec": {
                "unschedulable": True,
                "taints": [{"key": "millpond.dev/test-node", "effect": "NoSchedule"}],
            },
        }
        self._kube.core.create_node(node)
        self._thread.start()

    def stop(self) -> None:
        """End and take the node away."""
        self._stop.set()
        self._thread.join(timeout=10)
        self._kube.core.delete_node(self.node)

    def _run(self) -> None:
        api = client.CoreV1Api(Kube(self._kube.kubeconfig).api_client)
        beat_at = 0.0
        while not self._stop.is_set():
            with self._go_on():
                if time.monotonic() >= beat_at:
                    self._beat(api)
                    beat_at = time.monotonic() + HEARTBEAT_SECONDS
            with self._go_on():
                listed = api.list_namespaced_pod(self._kube.namespace, _preload_content=False).json()
                self.pods = listed["items"]
            for pod in self.pods:
                with self._go_on():
                    self._tend(api, pod)
            self._stop.wait(POLL_SECONDS)

    @contextlib.contextmanager
    def _go_on(self) -> Iterator[None]:
        """A call that fails is repeated by the next round; one pod's trouble stops no other."""
        try:
            yield
        except ApiException as error:
            if error.status not in (404, 409):
                self.errors.append(f"{error.status}: {error.body}")
        except HTTPError as error:
            self.errors.append(repr(error))

    def _beat(self, api: client.CoreV1Api) -> None:
        """Say that the node lives: from one that says nothing, pods are evicted after some minutes."""
        condition = {"type": "Ready", "status": "True", "lastHeartbeatTime": make_stamp()}
        api.patch_node_status(self.node, {"status": {"conditions": [condition]}}, _preload_content=False)

    def _tend(self, api: client.CoreV1Api, pod: Manifest) -> None:
        uid, now = pod["metadata"]["uid"], time.monotonic()
        behaviour = self.behave(pod)
        if uid not in self._seen:
            if not behaviour.schedules or pod["metadata"].get("deletionTimestamp"):
                return
            if not pod["spec"].get("nodeName"):
                self._bind(api, pod)
            self._seen[uid] = _Seen(now, f"10.99.{next(_addresses) // 250}.{next(_addresses) % 250 + 1}")
        seen = self._seen[uid]
        if pod["metadata"].get("deletionTimestamp"):
            self._end(api, pod, seen, behaviour, now)
            return
        ready = is_ready(behaviour, age=now - seen.bound_at)
        if ready != seen.was_ready or not seen.stamp:
            seen.stamp, seen.was_ready = make_stamp(), ready
        status = make_status(pod, behaviour, address=seen.address, ready=ready, stamp=seen.stamp)
        if status != seen.reported:
            api.patch_namespaced_pod_status(pod["metadata"]["name"], self._kube.namespace, {"status": status})
            seen.reported = status

    def _bind(self, api: client.CoreV1Api, pod: Manifest) -> None:
        name = pod["metadata"]["name"]
        target = {"apiVersion": "v1", "kind": "Node", "name": self.node}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
        api.create_namespaced_pod_binding(name, self._kube.namespace, body, _preload_content=False)

    def _end(
        self, api: client.CoreV1Api, pod: Manifest, seen: _Seen, behaviour: Behaviour, now: float
    ) -> None:
        seen.deleted_at = seen.deleted_at or now
        if now - seen.deleted_at >= behaviour.drain_seconds:
            name = pod["metadata"]["name"]
            api.delete_namespaced_pod(
                name, self._kube.namespace, grace_period_seconds=0, _preload_content=False
            )


def make_stamp() -> str:
    """Now, as Kubernetes writes times."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def is_ready(behaviour: Behaviour, *, age: float) -> bool:
    """Whether a pod bound `age` seconds ago is ready."""
    started = behaviour.init_terminated is None and behaviour.waiting is None
    return started and behaviour.ready_after_seconds is not None and age >= behaviour.ready_after_seconds


def make_status(pod: Manifest, behaviour: Behaviour, *, address: str, ready: bool, stamp: str) -> Manifest:
    """The status a kubelet would report."""
    started = behaviour.init_terminated is None and behaviour.waiting is None
    containers = [
        _make_container(c, behaviour, started=started, ready=ready) for c in pod["spec"]["containers"]
    ]
    inits = [
        _make_init(c, behaviour.init_terminated if number == 0 else None, behaviour)
        for number, c in enumerate(pod["spec"].get("initContainers") or [])
    ]
    status: Manifest = {
        "phase": "Running" if started else "Pending",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "conditions": [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Ready", "status": "True" if ready else "False", "lastTransitionTime": stamp},
            {"type": "ContainersReady", "status": "True" if ready else "False"},
        ],
        "containerStatuses": containers,
    }
    return status | ({"initContainerStatuses": inits} if inits else {})


def _make_container(container: Manifest, behaviour: Behaviour, *, started: bool, ready: bool) -> Manifest:
    state: Manifest = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    if not started:
        state = {"waiting": behaviour.waiting or {"reason": "PodInitializing"}}
    made = {
        "name": container["name"],
        "image": container["image"],
        "imageID": "",
        "ready": ready,
        "restartCount": behaviour.restarts,
        "state": state,
    }
    return made | ({"lastState": {"terminated": behaviour.terminated}} if behaviour.terminated else {})


def _make_init(container: Manifest, terminated: Manifest | None, behaviour: Behaviour) -> Manifest:
    made = {
        "name": container["name"],
        "image": container["image"],
        "imageID": "",
        "restartCount": behaviour.restarts,
    }
    if terminated is None:
        done = {"exitCode": 0, "reason": "Completed", "message": behaviour.init_message}
        return made | {"ready": True, "state": {"terminated": done}}
    waiting = {"reason": "CrashLoopBackOff", "message": "back-off restarting failed container"}
    return made | {"ready": False, "state": {"waiting": waiting}, "lastState": {"terminated": terminated}}
