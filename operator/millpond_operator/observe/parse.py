"""Objects of the API server into the records that decisions read."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from millpond_common.contract import labels
from millpond_operator.desired.kinds import Kind
from millpond_operator.plan.snapshot import Child, ContainerState, Pod, Workload

Obj = Mapping[str, Any]

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"


def parse_time(value: object) -> float | None:
    """Unix seconds of an API time stamp; None when absent."""
    if not value:
        return None
    return datetime.fromisoformat(str(value)).timestamp()


def parse_pod(obj: Obj) -> Pod:
    """Read what decisions need of a pod."""
    metadata, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    own = metadata.get("labels") or {}
    conditions = {c["type"]: c for c in status.get("conditions") or ()}
    ready = conditions.get("Ready") or {}
    scheduled = conditions.get("PodScheduled") or {}
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        revision=own.get(labels.REVISION, ""),
        role=own.get(labels.ROLE, ""),
        phase=status.get("phase") or "Pending",
        ready=ready.get("status") == "True",
        deleting=bool(metadata.get("deletionTimestamp")),
        cordoned=own.get(labels.CORDONED) == "true",
        scheduled=bool(spec.get("nodeName")),
        address=status.get("podIP") or "",
        node=spec.get("nodeName") or "",
        created_at=parse_time(metadata.get("creationTimestamp")) or 0.0,
        ready_since=parse_time(ready.get("lastTransitionTime")) if ready.get("status") == "True" else None,
        unschedulable_message=str(scheduled.get("message") or "")
        if scheduled.get("status") == "False" and not spec.get("nodeName")
        else "",
        deletion_cost=_parse_int((metadata.get("annotations") or {}).get(DELETION_COST)),
        containers=tuple(_parse_containers(status)),
        failure=_describe_failure(status),
        deletion_deadline=parse_time(metadata.get("deletionTimestamp")),
    )


def _describe_failure(status: Obj) -> str:
    """As "Evicted: The node was low on resource: memory."; empty for a pod that has not failed as a whole."""
    if status.get("phase") != "Failed":
        return ""
    told = (str(status.get(key) or "") for key in ("reason", "message"))
    return ": ".join(text for text in told if text) or "no reason given"


def _parse_containers(status: Obj) -> list[ContainerState]:
    inits = [_parse_container(s, is_init=True) for s in status.get("initContainerStatuses") or ()]
    return inits + [_parse_container(s, is_init=False) for s in status.get("containerStatuses") or ()]


def _parse_container(status: Obj, *, is_init: bool) -> ContainerState:
    state, last = status.get("state") or {}, status.get("lastState") or {}
    waiting = state.get("waiting") or {}
    ended = state.get("terminated") or last.get("terminated") or {}
    return ContainerState(
        name=status["name"],
        is_init=is_init,
        ready=bool(status.get("ready")),
        restarts=int(status.get("restartCount") or 0),
        running="running" in state,
        waiting_reason=str(waiting.get("reason") or ""),
        waiting_message=str(waiting.get("message") or ""),
        exit_code=int(ended["exitCode"]) if "exitCode" in ended else None,
        exit_reason=str(ended.get("reason") or ""),
        exit_message=str(ended.get("message") or ""),
    )


def parse_workload(obj: Obj, replicas_manager: str) -> Workload:
    """Read what decisions need of an engine Deployment."""
    metadata, spec, status = obj["metadata"], obj["spec"], obj.get("status") or {}
    own = metadata.get("labels") or {}
    failures = (
        c for c in status.get("conditions") or () if c["type"] == "ReplicaFailure" and c["status"] == "True"
    )
    return Workload(
        name=metadata["name"],
        uid=metadata["uid"],
        role=own.get(labels.ROLE, ""),
        revision=own.get(labels.REVISION, ""),
        wanted=int(spec.get("replicas", 1)),
        replicas_manager=replicas_manager,
        generation=int(metadata.get("generation") or 0),
        observed_generation=int(status.get("observedGeneration") or 0),
        created_at=parse_time(metadata.get("creationTimestamp")) or 0.0,
        deleting=bool(metadata.get("deletionTimestamp")),
        failure_message=next((str(c.get("message") or "") for c in failures), ""),
    )


def parse_child(kind: Kind, obj: Obj, *, created: bool = False, scaled_by: str = "") -> Child:
    """Read ownership and content of an object under a name the operator uses."""
    metadata = obj["metadata"]
    owners = metadata.get("ownerReferences") or ()
    controller = next((owner for owner in owners if owner.get("controller")), None)
    return Child(
        kind=kind,
        name=metadata["name"],
        uid=metadata["uid"],
        labels=metadata.get("labels") or {},
        controller_uid=controller["uid"] if controller is not None else None,
        controller=f"{controller.get('kind')}/{controller.get('name')}" if controller is not None else "",
        owner_uids=frozenset(o["uid"] for o in owners),
        digest=(metadata.get("annotations") or {}).get(labels.APPLIED_DIGEST, ""),
        body=obj,
        deleting=bool(metadata.get("deletionTimestamp")),
        created=created,
        scaled_by=scaled_by,
    )


def _parse_int(value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        return 0
