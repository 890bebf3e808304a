"""The status of a pool from the facts; written only when it differs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from millpond_operator.api.status import (
    MAX_DRAINING,
    DrainingReplica,
    Judgement,
    PoolStatus,
    RoleStatus,
    update_conditions,
)
from millpond_operator.desired import names
from millpond_operator.desired.children import make_owner
from millpond_operator.desired.engine_config import GPU_RESOURCES
from millpond_operator.desired.gateway import make_endpoint
from millpond_operator.desired.pod import GRACE_MARGIN_SECONDS
from millpond_operator.plan.facts import Facts
from millpond_operator.plan.snapshot import Pod
from millpond_operator.plan.workloads import RolePlan


def make_status(facts: Facts, judgements: list[Judgement]) -> PoolStatus:
    """The whole status."""
    pool = facts.pool
    name, generation = pool.metadata.name, pool.metadata.generation
    conditions = update_conditions(
        pool.status.conditions, judgements, generation=generation, now=datetime.fromtimestamp(facts.now, UTC)
    )
    scaling = next((d.status for d in facts.decisions if d.status is not None), None)
    return PoolStatus(
        observed_generation=generation,
        model_name=pool.model_name,
        replicas=len(facts.snapshot.pods),
        ready_replicas=sum(len(role.answering) for role in facts.roles),
        updated_replicas=len(facts.current_pods),
        desired_replicas=facts.desired,
        selector=names.format_selector(names.make_pool_selector(name)),
        endpoint=_make_endpoint(facts),
        revision="-".join(role.revision for role in facts.roles) or None,
        conditions=conditions,
        scaling=scaling,
        model=facts.fit.model if facts.fit is not None else pool.status.model,
        roles=tuple(_make_role(facts, role) for role in facts.roles),
        draining=tuple(_make_draining(facts, pod) for pod in facts.snapshot.pods if pod.deleting)[
            :MAX_DRAINING
        ],
    )


def _make_endpoint(facts: Facts) -> str:
    pool, build = facts.pool, facts.settings.build
    if pool.spec.gateway.enabled:
        return make_endpoint(pool.metadata.namespace, build)
    service = names.make_service_name(pool.metadata.name)
    return f"http://{service}.{make_owner(pool).namespace}.svc.{build.cluster_domain}:8000/v1"


def _make_role(facts: Facts, role: RolePlan) -> RoleStatus:
    selector = names.make_role_selector(facts.pool.metadata.name, role.role.role.lower())
    return RoleStatus(
        name=role.role.role,
        replicas=len(role.pods),
        ready_replicas=len(role.answering),
        selector=names.format_selector(selector),
        devices=_count_devices(facts, role),
    )


def _count_devices(facts: Facts, role: RolePlan) -> int | None:
    """Accelerators that the role's scheduled replicas hold, leaving ones included; None without any, or where claims are not certain."""
    resources = role.role.resources
    need = facts.snapshot.claim_needs.get(role.role.role)
    if resources.claims and need is None:
        return None
    counted = sum(int(resources.limits.get(name, 0)) for name in GPU_RESOURCES)
    each = counted + (need.num_devices if need is not None else 0)
    return each * sum(1 for pod in role.pods if pod.scheduled and pod.phase != "Failed") if each else None


def _make_draining(facts: Facts, pod: Pod) -> DrainingReplica:
    """A leaving replica with what gateways still have open on it, and the kubelet's deadline."""
    gateway = facts.snapshot.gateway
    endpoints = gateway.find_endpoints(pod.uid) if gateway is not None else ()
    left = sum(endpoint.open_requests for endpoint in endpoints) if endpoints else None
    deadline = None
    if pod.deletion_deadline is not None:
        deadline = datetime.fromtimestamp(pod.deletion_deadline, UTC) - timedelta(
            seconds=GRACE_MARGIN_SECONDS
        )
    return DrainingReplica(replica=pod.name, num_requests=left, deadline=deadline)
