"""Writes to the children: what is missing, what drifted, what has to go, and what belongs to somebody else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from millpond_common.contract import labels
from millpond_operator.desired.children import make_children, make_owner
from millpond_operator.desired.gateway import GATEWAY_KINDS, make_gateway
from millpond_operator.desired.kinds import (
    BUDGET,
    CLAIM,
    CONFIG_MAP,
    DEPLOYMENT,
    NETWORK_POLICY,
    ROLE_BINDING,
)
from millpond_operator.desired.manifest import Manifest, Owner
from millpond_operator.desired.workload import RevisionRecord
from millpond_operator.plan.actions import STAGE_FIRST, STAGE_REST, Apply, Delete
from millpond_operator.plan.drift import find_difference, has_drifted
from millpond_operator.plan.settings import PlanSettings
from millpond_operator.plan.snapshot import Child, PoolSnapshot


@dataclass(frozen=True, slots=True)
class ChildrenPlan:
    """Writes, and names that are taken by objects of others."""

    applies: tuple[Apply, ...]
    deletes: tuple[Delete, ...]
    foreign: tuple[str, ...]
    """As "Deployment smollm2-…, controlled by …"."""
    leftovers: tuple[str, ...] = ()
    """Names still held by what an earlier pool of this name left to the garbage collector."""


def plan_children(snapshot: PoolSnapshot, settings: PlanSettings) -> ChildrenPlan:
    """Writes to the children a pool has once, and to the namespace's gateway."""
    wanted = [(manifest, STAGE_REST) for manifest in make_children(snapshot.pool, settings.build)]
    wanted = [
        (m, STAGE_FIRST if m.kind.name in ("ServiceAccount", "PersistentVolumeClaim") else s)
        for m, s in wanted
    ]
    gateway = _make_gateway(snapshot, settings)
    applies, foreign, leftovers = [], [], []
    for manifest, stage in [*wanted, *((m, STAGE_REST) for m in gateway)]:
        live = snapshot.find_child(manifest.kind, manifest.name)
        if live is not None and is_leftover(live, snapshot):
            leftovers.append(describe_leftover(live))
        elif live is not None and not is_ours(live, snapshot):
            foreign.append(describe_foreign(live))
        elif live is None or (has_drifted(manifest, live) and not _is_immutable(live)):
            applies.append(make_apply(manifest, stage, live))
    stale = [d for m in gateway if (d := _replace(m, snapshot)) is not None]
    applies = [
        a for a in applies if all((a.manifest.kind, a.manifest.name) != (d.kind, d.name) for d in stale)
    ]
    deletes = [*stale, *_drop_unwanted(snapshot, [m for m, _ in wanted]), *_drop_gateway(snapshot)]
    return ChildrenPlan(tuple(applies), tuple(deletes), tuple(foreign), tuple(leftovers))


def make_apply(manifest: Manifest, stage: int, live: Child | None) -> Apply:
    """The write that makes a missing object or mends the live one."""
    return (
        Apply(manifest, stage, uid=None)
        if live is None
        else Apply(manifest, stage, uid=live.uid, adopt=live.created)
    )


def is_ours(live: Child, snapshot: PoolSnapshot) -> bool:
    """Whether the operator may write the object: controlled by this pool, or a gateway object of the operator's."""
    if live.controller_uid is not None:
        return live.controller_uid == snapshot.pool.metadata.uid
    is_gateway = live.name == labels.GATEWAY_NAME and live.labels.get(labels.MANAGED_BY) == labels.MANAGER
    return is_gateway and bool(live.digest)


def is_leftover(live: Child, snapshot: PoolSnapshot) -> bool:
    """Whether an earlier pool of this name controls the object, so that the garbage collector is about to remove it."""
    metadata = snapshot.pool.metadata
    same_name = live.controller == f"{labels.KIND}/{metadata.name}"
    return same_name and live.controller_uid != metadata.uid


def describe_leftover(live: Child) -> str:
    """What holds a name for a moment longer."""
    return f"{live.kind.name} {live.name}"


def describe_foreign(live: Child) -> str:
    """Who holds a name the operator needs."""
    holder = (
        f"controlled by another owner ({live.controller_uid})"
        if live.controller_uid
        else "made by somebody else"
    )
    return f"{live.kind.name} {live.name}, {holder}"


def _is_immutable(live: Child) -> bool:
    """A claim's spec cannot change after it was made; its size is settled by the first apply."""
    return live.kind == CLAIM


def _replace(manifest: Manifest, snapshot: PoolSnapshot) -> Delete | None:
    """The end of a binding to another role, which no apply can change; the next round makes it anew.

    The role has another name once the chart is installed under another name, or for some namespaces instead of all.
    """
    live = snapshot.find_child(manifest.kind, manifest.name) if manifest.kind == ROLE_BINDING else None
    if live is None or live.deleting or not is_ours(live, snapshot):
        return None
    if find_difference(manifest.body["roleRef"], live.body.get("roleRef")) is None:
        return None
    return Delete(live.kind, live.name, live.uid, "a binding cannot be turned to another role")


def _make_gateway(snapshot: PoolSnapshot, settings: PlanSettings) -> list[Manifest]:
    if not snapshot.pool.spec.gateway.enabled:
        return []
    namespace = snapshot.pool.metadata.namespace
    owners = [Owner(namespace, pool.name, pool.uid) for pool in snapshot.gateway_pools]
    live = snapshot.find_child(DEPLOYMENT, labels.GATEWAY_NAME)
    # No pool says how many gateways there are, so whoever scales them keeps the count; the setting is where it starts.
    owns_count = live is None or not live.scaled_by
    return make_gateway(
        owners or [make_owner(snapshot.pool)],
        settings.build,
        owns_count=owns_count,
        keyed=snapshot.sees_gateway_key,
    )


def _drop_unwanted(snapshot: PoolSnapshot, wanted: Iterable[Manifest]) -> list[Delete]:
    """Children this pool had once and no longer asks for (a claim after the cache type changed, a policy)."""
    names = {(manifest.kind, manifest.name) for manifest in wanted}
    droppable = (CLAIM, NETWORK_POLICY, BUDGET)
    return [
        Delete(child.kind, child.name, child.uid, "the pool no longer asks for it")
        for child in snapshot.children
        if child.kind in droppable
        and child.controller_uid == snapshot.pool.metadata.uid
        and (child.kind, child.name) not in names
        and not child.deleting
    ]


def _drop_gateway(snapshot: PoolSnapshot) -> list[Delete]:
    """The gateway's objects once no pool of the namespace wants it."""
    if snapshot.gateway_pools:
        return []
    return [
        Delete(child.kind, child.name, child.uid, "no pool of the namespace wants the gateway")
        for child in snapshot.children
        if child.name == labels.GATEWAY_NAME
        and child.kind in GATEWAY_KINDS
        and is_ours(child, snapshot)
        and not child.deleting
    ]


def drop_old_records(
    snapshot: PoolSnapshot, records: Iterable[RevisionRecord], *, in_use: set[str], history: int
) -> list[Delete]:
    """Records of revisions beyond the history; what has replicas or is current always keeps its own."""
    keep = in_use | {record.name for record in records}
    old = [
        child
        for child in snapshot.children
        if child.kind == CONFIG_MAP
        and child.controller_uid == snapshot.pool.metadata.uid
        and labels.REVISION in child.labels
        and child.name not in keep
        and not child.deleting
    ]
    old.sort(key=lambda child: str(child.body["metadata"].get("creationTimestamp") or ""), reverse=True)
    return [Delete(child.kind, child.name, child.uid, "beyond the kept history") for child in old[history:]]
