"""Records of the operator's tests, each valid by default and changed in one place."""

from __future__ import annotations

from typing import Any

from tests.support.pools import make_pool as make_object

from millpond_common.contract import labels
from millpond_common.contract.gateway_report import EndpointReport, PoolReport
from millpond_operator.api.pool import InferencePool, RoleView, list_roles, parse_pool
from millpond_operator.desired.revision import compute_revision
from millpond_operator.desired.settings import BuildSettings
from millpond_operator.observe.parse import parse_child, parse_workload
from millpond_operator.plan.actions import Apply, PoolPlan
from millpond_operator.plan.planner import plan
from millpond_operator.plan.settings import PlanSettings
from millpond_operator.plan.snapshot import (
    Child,
    ContainerState,
    GatewayView,
    Pod,
    PoolSnapshot,
    ProbeAnswer,
    SiblingPool,
    Workload,
)

BUILD = BuildSettings(engine_image="engine:1", gateway_image="gateway:1")
SETTINGS = PlanSettings(build=BUILD)
NOW = 1_800_000_000.0


def make_pool(
    *, status: dict[str, Any] | None = None, metadata: dict[str, Any] | None = None, **spec: Any
) -> InferencePool:
    """A pool as read from the API server."""
    obj = make_object("smol", **spec)
    obj["metadata"] |= {
        "namespace": "ns",
        "uid": "pool-uid",
        "generation": 3,
        "finalizers": [labels.FINALIZER],
        **(metadata or {}),
    }
    return parse_pool(obj | ({"status": status} if status is not None else {}))


def get_role(pool: InferencePool) -> RoleView:
    """Its only role."""
    return list_roles(pool)[0]


def make_pod(name: str = "pod-0", *, revision: str = "", **changes: Any) -> Pod:
    """A ready engine pod."""
    values: dict[str, Any] = {
        "name": name,
        "uid": f"uid-{name}",
        "revision": revision,
        "role": "both",
        "phase": "Running",
        "ready": True,
        "deleting": False,
        "cordoned": False,
        "scheduled": True,
        "address": "10.0.0.1",
        "node": "node-1",
        "created_at": NOW - 100,
        "ready_since": NOW - 50,
        "unschedulable_message": "",
        "deletion_cost": 0,
        "containers": (),
    }
    return Pod(**(values | changes))


def make_container(**changes: Any) -> ContainerState:
    """A running engine container that is not ready."""
    values: dict[str, Any] = {
        "name": "engine",
        "is_init": False,
        "ready": False,
        "restarts": 0,
        "running": True,
    }
    return ContainerState(**(values | changes))


def make_gateway_view(*pods: Pod, unrouted: tuple[str, ...] = (), open_requests: int = 0) -> GatewayView:
    """One gateway that routes to the pods."""
    endpoints = tuple(
        EndpointReport(
            pod=pod.name,
            pod_uid=pod.uid,
            revision=pod.revision,
            role=pod.role,
            routable=pod.serving and pod.name not in unrouted,
            open_requests=open_requests,
            uncached_tokens=0,
        )
        for pod in pods
    )
    return GatewayView(num_ready=1, num_reporting=1, reports=(PoolReport("smol", endpoints),))


def make_snapshot(pool: InferencePool, *, pods: tuple[Pod, ...] = (), **changes: Any) -> PoolSnapshot:
    """A pool whose pods are routed and have answered, without any child yet."""
    values: dict[str, Any] = {
        "pool": pool,
        "observed_at": NOW,
        "pods": pods,
        "gateway": make_gateway_view(*pods),
        "gateway_pools": (SiblingPool("smol", "pool-uid"),),
        "probes": {pod.uid: ProbeAnswer(pod.uid, True, "", NOW) for pod in pods},
    }
    return PoolSnapshot(**(values | changes))


def make_living(pool: InferencePool, *, pods: tuple[Pod, ...], **changes: Any) -> PoolSnapshot:
    """A snapshot in which everything the planner asks for exists already."""
    first = plan(make_snapshot(pool, pods=pods), SETTINGS, NOW)
    children = tuple(make_child(action) for action in first.actions if isinstance(action, Apply))
    return make_snapshot(pool, pods=pods, children=children, workloads=list_workloads(children), **changes)


def make_child(apply: Apply, **metadata: Any) -> Child:
    """The object an apply would leave behind."""
    manifest = apply.manifest
    uid = f"uid-{manifest.kind.name}-{manifest.name}"
    body = {**manifest.body, "metadata": {**manifest.body["metadata"], "uid": uid, **metadata}}
    return parse_child(manifest.kind, body)


def list_workloads(children: tuple[Child, ...]) -> tuple[Workload, ...]:
    """Engine Deployments among children."""
    found = [c.body for c in children if c.kind.name == "Deployment" and labels.REVISION in c.labels]
    return tuple(parse_workload(body, labels.MANAGER) for body in found)


def make_revision(pool: InferencePool) -> str:
    """Current revision of the pool's only role."""
    return compute_revision(pool, get_role(pool))


def list_applied(decided: PoolPlan) -> dict[str, dict[str, Any]]:
    """Bodies of all applies, by "Kind/name"."""
    found = [action.manifest for action in decided.actions if isinstance(action, Apply)]
    return {f"{manifest.kind.name}/{manifest.name}": dict(manifest.body) for manifest in found}


def get_reasons(decided: PoolPlan) -> dict[str, tuple[str, str, str]]:
    """Status, reason and message of every condition."""
    assert decided.status is not None, "the status did not change"
    return {c.type: (c.status, c.reason, c.message) for c in decided.status.conditions}
