"""Builds the snapshot of one pool from the store and, where it matters, from a few calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from millpond_common.contract import labels
from millpond_common.contract.reasons import ConditionType
from millpond_operator.api.pool import InferencePool, list_roles, parse_pool
from millpond_operator.api.status import ModelStatus, get_condition, parse_model_status
from millpond_operator.desired import names
from millpond_operator.desired.children import list_claims, list_key_secrets, list_secrets
from millpond_operator.desired.kinds import CHILDREN, CLAIM, DEPLOYMENT, POD, POOL, SECRET
from millpond_operator.desired.model import make_files_digest
from millpond_operator.desired.revision import compute_revision
from millpond_operator.observe.claims import ClaimWatcher
from millpond_operator.observe.node_kinds import NodeKinds
from millpond_operator.observe.nodes import NodeWatcher
from millpond_operator.observe.parse import parse_child, parse_pod, parse_workload
from millpond_operator.observe.probes import Prober, ProbeTarget
from millpond_operator.observe.progress import FetchProgress
from millpond_operator.observe.references import ReferenceChecker
from millpond_operator.observe.reports import ReportCache
from millpond_operator.observe.scalers import ScalerWatcher
from millpond_operator.observe.store import GATEWAY_OWNER, Store, Stored
from millpond_operator.plan.capacity import ENDED, compute_capacity, may_run
from millpond_operator.plan.claims import pick_memory
from millpond_operator.plan.devices import find_device_memory
from millpond_operator.plan.known_model import needs_device_memory
from millpond_operator.plan.problems import find_problems
from millpond_operator.plan.snapshot import (
    MAX_GATEWAY_OWNERS,
    Capacity,
    Child,
    ClaimNeed,
    DeviceMemory,
    GatewayView,
    Pod,
    PoolSnapshot,
    SiblingPool,
    Workload,
)

SETTLED_REPORT_SECONDS = 30.0
MOVING_REPORT_SECONDS = 1.0
DRAINING_REPORT_SECONDS = 2.0
"""Of a settled pool that a replica is leaving: its status tells how many requests are left on it."""


class Observer:
    """Reads; it never writes to the cluster."""

    def __init__(
        self,
        store: Store,
        *,
        reports: ReportCache,
        prober: Prober,
        references: ReferenceChecker,
        nodes: NodeWatcher,
        progress: FetchProgress,
        scalers: ScalerWatcher,
        claims: ClaimWatcher,
        node_kinds: NodeKinds,
    ) -> None:
        self._store = store
        self._reports = reports
        self._prober = prober
        self._references = references
        self._nodes = nodes
        self._progress = progress
        self._scalers = scalers
        self._claims = claims
        self._node_kinds = node_kinds

    def get_raw(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        """The pool as the API server holds it; None when it is gone."""
        stored = self._store.get(POOL, namespace, name)
        return stored.body if stored is not None else None

    def look(self, namespace: str, name: str, now: float) -> PoolSnapshot | None:
        """The pool with its pods and counts, without any call; None when it is gone.

        Raises:
            SpecError: the pool cannot be read.
        """
        pool = self._store.read(POOL, namespace, name, _read_pool)
        if pool is None:
            return None
        return PoolSnapshot(
            pool=pool,
            observed_at=now,
            workloads=self._list_workloads(namespace, name),
            pods=self._list_pods(namespace, name)[0],
            scalers=self._scalers.get_names(namespace, name),
            count_manager=self._find_count_manager(namespace, name),
        )

    def list_gateway_pods(self, namespace: str) -> list[Pod]:
        """Pods of the namespace's gateway."""
        pods = self._store.read_of_pool(POD, namespace, GATEWAY_OWNER, _read_pod)
        return [pod for pod in pods if pod.phase not in ENDED]

    async def observe(self, namespace: str, name: str, now: float) -> PoolSnapshot | None:
        """Everything about one pool now; None when it is gone.

        Raises:
            SpecError: the pool cannot be read.
            KubeError: a call failed that a decision needs.
        """
        pool = self._store.read(POOL, namespace, name, _read_pool)
        if pool is None:
            return None
        pods, ended = self._list_pods(namespace, name)
        workloads = self._list_workloads(namespace, name)
        settled = is_settled(pool)
        gateway = await self._view_gateway(pool, now, max_age=choose_report_age(pods, settled=settled))
        self._ask(pool, pods, gateway)
        answers = {pod.uid: answer for pod in pods if (answer := self._prober.get_answer(pod)) is not None}
        missing_secrets, missing_claims = await self._find_missing(pool, settled=settled)
        keys = () if pool.is_deleting else list_key_secrets(pool)
        progress = await self._progress.fetch_lines(namespace, pods)
        needs = await self._claims.fetch_needs(pool)
        sees_key, gateway_key = await self._find_gateway_key(pool)
        snapshot = PoolSnapshot(
            pool=pool,
            observed_at=now,
            workloads=workloads,
            pods=pods,
            ended=ended,
            children=(*self._list_children(pool, workloads), *gateway_key),
            gateway=gateway,
            sees_gateway_key=sees_key,
            gateway_pools=self._list_gateway_pools(namespace),
            probes=answers,
            fetch_progress=progress,
            announced=self._progress.get_facts(pods),
            sibling_models=() if settled else self._list_sibling_models(pool),
            name_keeper=find_name_keeper(
                pool, [s.body for s in self._store.list_pools_of_model(namespace, pool.model_name)]
            ),
            missing_keys=await self._references.list_missing(SECRET, namespace, keys),
            forbidden_keys=await self._references.list_forbidden(SECRET, namespace, keys),
            missing_secrets=missing_secrets,
            missing_claims=missing_claims,
            capacity=await self._find_capacity(pool, pods, workloads, needs),
            claim_needs=needs,
            scalers=self._scalers.get_names(namespace, name),
            count_manager=self._find_count_manager(namespace, name),
            zones=await self._find_zones(pods),
        )
        if settled or pool.is_deleting or not needs_device_memory(snapshot):
            return snapshot
        return dataclasses.replace(snapshot, device_memory=await self._find_device_memory(pool, needs))

    async def _find_zones(self, pods: tuple[Pod, ...]) -> Mapping[str, str]:
        """Zones by node, asked for only where replicas lie on several nodes."""
        nodes = {pod.node for pod in pods if pod.node}
        if len(nodes) < 2:
            return {}
        await self._node_kinds.refresh(nodes)
        zones = self._node_kinds.get_zones()
        return {node: zones[node] for node in nodes if node in zones}

    def _list_sibling_models(self, pool: InferencePool) -> tuple[ModelStatus, ...]:
        """Sizes that other pools of the namespace know; read from their status without the rest of it."""
        namespace, name = pool.key
        if pool.status.model is not None and pool.status.model.files == make_files_digest(pool):
            return ()
        others = (s.body for s in self._store.list_in_namespace(POOL, namespace))
        told = [(b.get("status") or {}).get("model") for b in others if b["metadata"]["name"] != name]
        return tuple(found for data in told if data and (found := parse_model_status(data)) is not None)

    async def _find_device_memory(
        self, pool: InferencePool, needs: Mapping[str, ClaimNeed]
    ) -> Mapping[str, DeviceMemory] | None:
        rooms = await self._nodes.fetch_rooms()
        if rooms is None:
            return None
        claimed = await self._claims.fetch_rooms(needs)
        found: dict[str, DeviceMemory] = {}
        for role in list_roles(pool):
            spec = _find_pod_spec(self._store, pool, role.role.lower(), compute_revision(pool, role))
            if role.role in claimed:
                usable = [room.name for room in rooms if may_run(room, spec)]
                found[role.role] = pick_memory(claimed[role.role], usable)
            elif (memory := find_device_memory(rooms, role, spec)) is not None:
                found[role.role] = memory
        return found

    async def _find_gateway_key(self, pool: InferencePool) -> tuple[bool, tuple[Child, ...]]:
        """Whether the gateways' Secret may be looked for, and its metadata where it exists; it is never watched."""
        namespace = pool.metadata.namespace
        gone = self._store.get(DEPLOYMENT, namespace, labels.GATEWAY_NAME) is None
        if gone and (pool.is_deleting or not pool.spec.gateway.enabled):
            return False, ()
        sees, found = await self._references.find_own(SECRET, namespace, labels.GATEWAY_NAME)
        return sees, (parse_child(SECRET, found),) if found is not None else ()

    def _find_count_manager(self, namespace: str, name: str) -> str:
        stored = self._store.get(POOL, namespace, name)
        return stored.replicas_manager if stored is not None else ""

    def _list_pods(self, namespace: str, pool: str) -> tuple[tuple[Pod, ...], tuple[Pod, ...]]:
        """Pods that run or may run, and those that have ended for good."""
        pods = self._store.read_of_pool(POD, namespace, pool, _read_pod)
        living = tuple(pod for pod in pods if pod.phase not in ENDED)
        return living, tuple(pod for pod in pods if pod.phase in ENDED)

    def _list_workloads(self, namespace: str, pool: str) -> tuple[Workload, ...]:
        return tuple(self._store.read_of_pool(DEPLOYMENT, namespace, pool, _read_workload))

    def _list_children(self, pool: InferencePool, workloads: tuple[Workload, ...]) -> tuple[Child, ...]:
        """Objects with our labels, and objects of others under names the pool needs."""
        namespace, name = pool.key
        wanted = {names.make_account_name(name), names.make_service_name(name), names.make_claim_name(name)}
        wanted |= {labels.GATEWAY_NAME} | {workload.name for workload in workloads}
        wanted |= {
            names.make_workload_name(name, r.role.lower(), compute_revision(pool, r))
            for r in list_roles(pool)
        }
        children: dict[tuple[str, str], Child] = {}
        for kind in CHILDREN:
            own = self._store.list_of_pool(kind, namespace, name)
            own += self._store.list_of_pool(kind, namespace, GATEWAY_OWNER)
            own += [
                stored
                for item in sorted(wanted)
                if (stored := self._store.get(kind, namespace, item)) is not None
            ]
            found = (
                parse_child(kind, stored.body, created=stored.created, scaled_by=stored.scaled_by)
                for stored in own
            )
            children |= {(kind.plural, child.name): child for child in found}
        return tuple(children.values())

    def _list_gateway_pools(self, namespace: str) -> tuple[SiblingPool, ...]:
        bodies = [stored.body for stored in self._store.list_in_namespace(POOL, namespace)]
        wanting = [body for body in bodies if _wants_gateway(body)]
        wanting.sort(key=lambda body: _rank_owner(body["metadata"]))
        pools = [SiblingPool(body["metadata"]["name"], body["metadata"]["uid"]) for body in wanting]
        return tuple(pools[:MAX_GATEWAY_OWNERS])

    async def _view_gateway(self, pool: InferencePool, now: float, *, max_age: float) -> GatewayView | None:
        if not pool.spec.gateway.enabled:
            return None
        namespace, name = pool.key
        pods = self.list_gateway_pods(namespace)
        view = await self._reports.fetch_view(namespace, name, pods, max_age=max_age)
        problems = find_problems(tuple(pods), None, "its share", now=now) if view.num_ready == 0 else ()
        return dataclasses.replace(view, problem=problems[0].message) if problems else view

    def _ask(self, pool: InferencePool, pods: tuple[Pod, ...], gateway: GatewayView | None) -> None:
        """Have a real request sent to every replica that should answer one and has not yet."""
        address = None if gateway is None else self._find_gateway_address(pool.metadata.namespace)
        if gateway is not None and (gateway.num_reporting == 0 or address is None):
            return
        for pod in pods:
            if pod.serving and pod.address and (gateway is None or gateway.is_routed(pod.uid)):
                self._prober.ask(ProbeTarget(pool.key, pod, address, pool.model_name))

    def _find_gateway_address(self, namespace: str) -> str | None:
        pods = self.list_gateway_pods(namespace)
        return next((pod.address for pod in pods if pod.ready and not pod.deleting and pod.address), None)

    async def _find_missing(
        self, pool: InferencePool, *, settled: bool
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        if settled or pool.is_deleting:
            return (), ()
        namespace = pool.metadata.namespace
        secrets = await self._references.list_missing(SECRET, namespace, list_secrets(pool))
        claims = await self._references.list_missing(CLAIM, namespace, list_claims(pool))
        return secrets, claims

    async def _find_capacity(
        self,
        pool: InferencePool,
        pods: tuple[Pod, ...],
        workloads: tuple[Workload, ...],
        needs: Mapping[str, ClaimNeed],
    ) -> Capacity | None:
        roles = [(role.role.lower(), role, compute_revision(pool, role)) for role in list_roles(pool)]
        current = {revision for _, _, revision in roles}
        rolling = any(workload.revision not in current for workload in workloads)
        stuck = any(pod.unschedulable_message for pod in pods)
        if pool.is_deleting or not (rolling or stuck):
            return None
        rooms = await self._nodes.fetch_rooms()
        if rooms is None:
            return None
        specs = [
            (label, role, _find_pod_spec(self._store, pool, label, revision))
            for label, role, revision in roles
        ]
        claimed = {role.lower(): room for role, room in (await self._claims.fetch_rooms(needs)).items()}
        return compute_capacity(rooms, specs, claimed)


def _find_pod_spec(store: Store, pool: InferencePool, role: str, revision: str) -> Mapping[str, Any]:
    """The pod spec of the current revision where its Deployment exists, else the resources alone."""
    namespace, name = pool.key
    stored = store.get(DEPLOYMENT, namespace, names.make_workload_name(name, role, revision))
    if stored is not None:
        spec: Mapping[str, Any] = stored.body["spec"]["template"]["spec"]
        return spec
    view = next(r for r in list_roles(pool) if r.role.lower() == role)
    template = view.templates[-1]
    resources = {"limits": view.resources.limits, "requests": view.resources.requests}
    return {
        "containers": [{"resources": resources}],
        "nodeSelector": template.node_selector,
        "tolerations": list(template.tolerations),
    }


def _read_pool(stored: Stored) -> InferencePool:
    return parse_pool(stored.body)


def _read_pod(stored: Stored) -> Pod:
    return parse_pod(stored.body)


def _read_workload(stored: Stored) -> Workload:
    return parse_workload(stored.body, stored.replicas_manager)


def find_name_keeper(pool: InferencePool, bodies: Iterable[Mapping[str, Any]]) -> str:
    """The oldest of the pools with one model name if it is another one, in the order in which gateways choose.

    `bodies`: all pools of the namespace with the model name of `pool`, itself included.
    """
    if not pool.spec.gateway.enabled or pool.is_deleting:
        return ""
    sharing = [body["metadata"] for body in bodies if _wants_gateway(body)]
    keeper = min(sharing, key=_rank_owner, default=None)
    return "" if keeper is None or keeper["name"] == pool.metadata.name else str(keeper["name"])


def _wants_gateway(body: Mapping[str, Any]) -> bool:
    return bool(((body.get("spec") or {}).get("gateway") or {}).get("enabled", True))


def _rank_owner(metadata: Mapping[str, Any]) -> tuple[bool, str, str]:
    return (
        bool(metadata.get("deletionTimestamp")),
        str(metadata.get("creationTimestamp") or ""),
        metadata["name"],
    )


def choose_report_age(pods: tuple[Pod, ...], *, settled: bool) -> float:
    """How old a gateway's report may be: as old as nobody waits for what it says."""
    if not pods:
        return SETTLED_REPORT_SECONDS
    if not settled:
        return MOVING_REPORT_SECONDS
    return DRAINING_REPORT_SECONDS if any(pod.deleting for pod in pods) else SETTLED_REPORT_SECONDS


def is_settled(pool: InferencePool) -> bool:
    """Whether the status says Ready for this very generation."""
    ready = get_condition(pool.status, ConditionType.READY)
    return (
        ready is not None and ready.status == "True" and ready.observed_generation == pool.metadata.generation
    )
