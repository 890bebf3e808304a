"""A cluster in a few hundred lines of pure code: Deployments, pods, GPUs, a gateway, and time in ticks.

It takes the planner's actions as the API server would and answers with objects in the API's own form, so the planner
is tested through the parsers it runs behind.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from millpond_common.contract import labels
from millpond_common.contract.gateway_report import EndpointReport, PoolReport
from millpond_operator.api.pool import InferencePool, list_roles, parse_pool
from millpond_operator.api.status import PoolStatus, dump_status
from millpond_operator.desired.kinds import DEPLOYMENT, Kind
from millpond_operator.desired.settings import BuildSettings
from millpond_operator.observe.parse import parse_child, parse_pod, parse_workload
from millpond_operator.plan.actions import (
    STAGE_FIRST,
    STAGE_WORKLOADS,
    Action,
    Apply,
    Delete,
    MarkPod,
    PoolPlan,
    SetFinalizer,
)
from millpond_operator.plan.planner import plan
from millpond_operator.plan.settings import PlanSettings
from millpond_operator.plan.snapshot import Capacity, GatewayView, PoolSnapshot, ProbeAnswer, SiblingPool

Manifest = dict[str, Any]
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
SETTINGS = PlanSettings(
    build=BuildSettings(engine_image="engine:1", gateway_image="gateway:1"), unschedulable_patience_seconds=3
)
EPOCH = 1_700_000_000


class StrangerError(AssertionError):
    """A write hit an object with another uid."""


@dataclass
class SimPod:
    """One engine pod."""

    name: str
    uid: str
    labels: dict[str, str]
    created: int
    annotations: dict[str, str] = field(default_factory=dict)
    scheduled: bool = False
    ready_at: int | None = None
    deleting_since: int | None = None
    routed_at: int | None = None

    def is_ready(self, tick: int) -> bool:
        """Whether its readiness probe passes."""
        return self.ready_at is not None and tick >= self.ready_at

    @property
    def revision(self) -> str:
        """Its revision label."""
        return self.labels[labels.REVISION]


@dataclass
class SimCluster:
    """One pool in one namespace."""

    spec: Manifest
    gpus: int = 1_000_000
    load_ticks: int = 2
    drain_ticks: int = 2
    route_ticks: int = 1
    knows_capacity: bool = True
    bad_images: frozenset[str] = frozenset({"bad"})
    gateway_up: bool = True
    tick: int = 0
    generation: int = 1
    status: PoolStatus = field(default_factory=PoolStatus)
    finalizers: tuple[str, ...] = ()
    deleted_at: int | None = None
    objects: dict[tuple[Kind, str], Manifest] = field(default_factory=dict)
    pods: dict[str, SimPod] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    killed: set[str] = field(default_factory=set)
    """Uids of pods that a test deleted by hand."""
    writes: int = 0
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    # --- what the planner sees -----------------------------------------------------------------------------------

    def make_pool(self) -> InferencePool:
        """The pool as parsed from its object."""
        metadata: Manifest = {
            "name": "pool",
            "namespace": "ns",
            "uid": "pool-uid",
            "generation": self.generation,
            "finalizers": list(self.finalizers),
        }
        if self.deleted_at is not None:
            metadata["deletionTimestamp"] = _stamp(self.deleted_at)
        return parse_pool({"metadata": metadata, "spec": self.spec, "status": dump_status(self.status)})

    def make_snapshot(self) -> PoolSnapshot:
        """What an observer would report now."""
        pods = tuple(parse_pod(self._pod_object(pod)) for pod in self.pods.values())
        pool = self.make_pool()
        gateway = GatewayView(
            num_ready=1,
            num_reporting=1 if self.gateway_up else 0,
            reports=(
                PoolReport("pool", tuple(self._endpoint(p) for p in self.pods.values() if self._known(p))),
            )
            if self.gateway_up
            else (),
        )
        answered = {p.uid: ProbeAnswer(p.uid, True, "", 0.0) for p in self.pods.values() if self.is_routed(p)}
        return PoolSnapshot(
            pool=pool,
            observed_at=float(EPOCH + self.tick),
            workloads=tuple(
                parse_workload(o, o["manager"])
                for (k, _), o in self.objects.items()
                if k == DEPLOYMENT and labels.REVISION in o["metadata"]["labels"]
            ),
            pods=pods,
            children=tuple(parse_child(kind, obj) for (kind, _), obj in self.objects.items()),
            gateway=gateway,
            gateway_pools=(SiblingPool("pool", "pool-uid"),),
            sees_gateway_key=True,
            probes=answered,
            capacity=self._capacity() if self.knows_capacity else None,
        )

    def decide(self, settings: PlanSettings = SETTINGS) -> PoolPlan:
        """Plan from what is there now."""
        return plan(self.make_snapshot(), settings, float(EPOCH + self.tick))

    def is_routed(self, pod: SimPod) -> bool:
        """Whether the gateway may choose the pod."""
        late = pod.routed_at is None or self.tick < pod.routed_at
        leaving = pod.deleting_since is not None or pod.labels.get(labels.CORDONED) == "true"
        return self.gateway_up and pod.is_ready(self.tick) and not late and not leaving

    def count_answering(self) -> int:
        """Pods that answer requests through the gateway."""
        return sum(1 for pod in self.pods.values() if self.is_routed(pod))

    # --- what the planner does -----------------------------------------------------------------------------------

    def execute(self, decided: PoolPlan, *, crash_after: int | None = None) -> None:
        """Take the writes; a crash after n of them loses the rest, the status and the events."""
        actions: Iterable[Action] = sorted(decided.actions, key=_order)
        for done, action in enumerate(actions):
            if crash_after is not None and done >= crash_after:
                return
            self._take(action)
            self.writes += 1
        if crash_after is not None:
            return
        if decided.status is not None:
            self.status = decided.status
        self.events += [f"{note.reason}: {note.message}" for note in decided.events]

    def _take(self, action: Action) -> None:
        if isinstance(action, SetFinalizer):
            self.finalizers = (labels.FINALIZER,) if action.present else ()
        elif isinstance(action, Apply):
            self._apply(action)
        elif isinstance(action, Delete):
            self._delete(action)
        else:
            self._mark(action)

    def _apply(self, action: Apply) -> None:
        key = (action.manifest.kind, action.manifest.name)
        known = self.objects.get(key)
        if action.uid is not None and (known is None or known["metadata"]["uid"] != action.uid):
            raise StrangerError(f"{key} has another uid")
        uid = known["metadata"]["uid"] if known is not None else f"uid-{next(self._numbers)}"
        body = dict(action.manifest.body)
        body["metadata"] = {**body["metadata"], "uid": uid, "creationTimestamp": _stamp(self.tick)}
        if known is not None:
            body["metadata"]["creationTimestamp"] = known["metadata"]["creationTimestamp"]
        self.objects[key] = {**body, "manager": labels.MANAGER}

    def _delete(self, action: Delete) -> None:
        known = self.objects.get((action.kind, action.name))
        if known is not None and known["metadata"]["uid"] == action.uid:
            del self.objects[(action.kind, action.name)]

    def _mark(self, action: MarkPod) -> None:
        pod = self.pods.get(action.name)
        if pod is not None and pod.uid == action.uid:
            _merge(pod.labels, action.labels)
            _merge(pod.annotations, action.annotations)

    # --- what the cluster does -----------------------------------------------------------------------------------

    def step(self) -> None:
        """One tick of controllers, scheduler, kubelet and gateway."""
        self.tick += 1
        for pod in list(self.pods.values()):
            if pod.deleting_since is not None and self.tick - pod.deleting_since >= self.drain_ticks:
                del self.pods[pod.name]
        for obj in self.list_workloads():
            self._fill(obj)
        self._drop_orphans()
        for pod in self.pods.values():
            self._start(pod)

    def list_workloads(self) -> list[Manifest]:
        """Engine Deployments."""
        return [
            o
            for (k, _), o in self.objects.items()
            if k == DEPLOYMENT and labels.REVISION in o["metadata"]["labels"]
        ]

    def _fill(self, workload: Manifest) -> None:
        """The ReplicaSet controller: unscheduled first, then unready, then cheap, then young."""
        revision, wanted = workload["metadata"]["labels"][labels.REVISION], workload["spec"]["replicas"]
        own = [p for p in self.pods.values() if p.revision == revision and p.deleting_since is None]
        own.sort(
            key=lambda p: (
                p.scheduled,
                p.is_ready(self.tick),
                int(p.annotations.get(DELETION_COST, 0)),
                -p.created,
            )
        )
        for pod in own[: max(0, len(own) - wanted)]:
            self.kill(pod)
        for _ in range(wanted - len(own)):
            number = next(self._numbers)
            template = workload["spec"]["template"]
            self.pods[f"pod-{number}"] = SimPod(
                f"pod-{number}", f"pod-uid-{number}", dict(template["metadata"]["labels"]), self.tick,
                annotations={"image": template["spec"]["containers"][0]["image"]},
            )  # fmt: skip

    def kill(self, pod: SimPod) -> None:
        """Delete a pod; one that never ran is gone at once."""
        if pod.scheduled:
            pod.deleting_since = self.tick
        else:
            del self.pods[pod.name]

    def _drop_orphans(self) -> None:
        living = {o["metadata"]["labels"][labels.REVISION] for o in self.list_workloads()}
        for pod in list(self.pods.values()):
            if pod.revision not in living and pod.deleting_since is None:
                self.kill(pod)

    def _start(self, pod: SimPod) -> None:
        if not pod.scheduled and sum(1 for p in self.pods.values() if p.scheduled) < self.gpus:
            pod.scheduled = True
            if pod.annotations["image"] not in self.bad_images:
                pod.ready_at = self.tick + self.load_ticks
                pod.routed_at = pod.ready_at + self.route_ticks

    def _capacity(self) -> Capacity:
        used = sum(1 for p in self.pods.values() if p.scheduled)
        roles = {role.role.lower() for role in list_roles(self.make_pool())}
        return Capacity(
            {role: max(0, self.gpus - used) for role in roles}, {"nvidia.com/gpu": str(self.gpus - used)}
        )

    def _known(self, pod: SimPod) -> bool:
        return pod.routed_at is not None and self.tick >= pod.routed_at

    def _endpoint(self, pod: SimPod) -> EndpointReport:
        return EndpointReport(
            pod=pod.name, pod_uid=pod.uid, revision=pod.revision, role="both",
            routable=self.is_routed(pod), open_requests=0, uncached_tokens=0,
        )  # fmt: skip

    def _pod_object(self, pod: SimPod) -> Manifest:
        metadata: Manifest = {
            "name": pod.name, "uid": pod.uid, "labels": pod.labels, "annotations": pod.annotations,
            "creationTimestamp": _stamp(pod.created),
        }  # fmt: skip
        if pod.deleting_since is not None:
            metadata["deletionTimestamp"] = _stamp(pod.deleting_since)
        ready = pod.is_ready(self.tick)
        conditions = [
            {"type": "Ready", "status": "True" if ready else "False", "lastTransitionTime": _stamp(0)}
        ]
        if not pod.scheduled:
            message = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
            conditions.append({"type": "PodScheduled", "status": "False", "message": message})
        return {
            "metadata": metadata,
            "spec": {"nodeName": "node"} if pod.scheduled else {},
            "status": {"phase": "Running" if pod.scheduled else "Pending", "conditions": conditions},
        }


def make_spec(*, replicas: int = 1, image: str = "good", **rollout: Any) -> Manifest:
    """A spec whose revision follows the image."""
    return {
        "model": {"source": "file:///models/tiny.gguf"},
        "engine": {"image": image},
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
        "replicas": replicas,
        "rollout": rollout,
    }


def _order(action: Action) -> tuple[int, int]:
    """The order in which the executor sends writes; it waits for answers only between marks and later applies."""
    if isinstance(action, SetFinalizer):
        return (2, 0) if action.present else (6, 0)
    if isinstance(action, MarkPod):
        return (3, 0)
    if not isinstance(action, Apply):
        return (5, 0)
    if action.stage == STAGE_WORKLOADS and action.is_new:
        return (0, 0)
    return (1, 0) if action.stage == STAGE_FIRST else (4, action.stage)


def _merge(target: dict[str, str], patch: Mapping[str, str | None]) -> None:
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        else:
            target[key] = value


def _stamp(tick: int) -> str:
    return datetime.fromtimestamp(EPOCH + tick, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
