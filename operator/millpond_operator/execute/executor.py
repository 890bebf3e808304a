"""Carries a plan out: in few stages, each write fenced by the Lease, each answer remembered at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from enum import Enum
from typing import Any, TypeVar

from millpond_common.contract.labels import APPLIED_DIGEST, FINALIZER, MANAGER
from millpond_operator.api.pool import PoolMetadata
from millpond_operator.clients.kube import KubeClient
from millpond_operator.desired.kinds import POD, POOL, SECRET, Kind
from millpond_operator.errors import ConflictError, NotFoundError
from millpond_operator.execute.secret import create_secret, find_secret, mend_secret
from millpond_operator.plan.actions import (
    STAGE_FIRST,
    STAGE_WORKLOADS,
    Action,
    Apply,
    Delete,
    MarkPod,
    SetFinalizer,
)
from millpond_operator.plan.adoption import adopt_fields

Fence = Callable[[], None]
"""Raises NotLeaderError unless this instance may write."""
Remember = Callable[[Kind, Mapping[str, Any]], object]
"""Takes an object as the API server answered it, so that the next decision sees the write."""


class Holder(Enum):
    """Who has a name."""

    NOBODY = "Nobody"
    OURS = "Ours"
    STRANGER = "Stranger"


Name = tuple[Kind, str]
T = TypeVar("T")


def _name(apply: Apply) -> Name:
    return apply.manifest.kind, apply.manifest.name


def _may_come_first(apply: Apply) -> bool:
    return apply.stage == STAGE_WORKLOADS and apply.is_new


class Executor:
    """Writes on behalf of one operator instance."""

    def __init__(self, kube: KubeClient, *, fence: Fence, remember: Remember) -> None:
        self._kube = kube
        self._fence = fence
        self._remember = remember

    async def run(self, pool: PoolMetadata, actions: Iterable[Action]) -> bool:
        """Do all actions; True when an object of somebody else was found, so that the pool should be planned anew.

        Raises:
            KubeError: a write was refused; those before it stand.
            NotLeaderError: another instance leads by now.
        """
        actions = tuple(actions)
        applies = [action for action in actions if isinstance(action, Apply)]
        finalizers = [action for action in actions if isinstance(action, SetFinalizer)]
        holders: dict[Name, Holder] = {}
        late = [apply for apply in applies if apply.stage != STAGE_FIRST and not _may_come_first(apply)]
        # Each round trip stands between a pool and its pods. A new workload waits for none: its controllers need two
        # more calls before a pod asks for its account, a kubelet many more, and any part of these that a crash leaves
        # behind converges. Counts wait for the marks that name their victims.
        await self._all(
            [
                *(self._write(apply, holders) for apply in applies if _may_come_first(apply)),
                *(self._write(apply, holders) for apply in applies if apply.stage == STAGE_FIRST),
                *(self._set_finalizer(pool, present=True) for f in finalizers if f.present),
                *(self._mark(pool, action) for action in actions if isinstance(action, MarkPod)),
            ]
        )
        for stage in sorted({apply.stage for apply in late}):
            await self._all(self._write(apply, holders) for apply in late if apply.stage == stage)
        await self._all(self._delete(pool, action) for action in actions if isinstance(action, Delete))
        for finalizer in (f for f in finalizers if not f.present):
            await self._set_finalizer(pool, present=finalizer.present)
        return Holder.STRANGER in holders.values()

    async def _all(self, writes: Iterable[Coroutine[Any, Any, None]]) -> None:
        await finish_all(list(writes))

    async def _write(self, apply: Apply, holders: dict[Name, Holder]) -> None:
        """Write one child, unless its name is a stranger's; who holds it goes into `holders`.

        What should not exist yet is created: one call, which is cheaper to the API server than an apply and refused
        where somebody has the name. Later writes are applies.
        """
        if apply.is_new and await self._create(apply):
            holders[_name(apply)] = Holder.OURS
            return
        existing = await self._find_existing(apply)
        holders[_name(apply)] = holder = self._find_holder(apply, existing)
        if existing is not None and holder is Holder.OURS and find_digest(existing) == apply.manifest.digest:
            return  # another pool's task made the gateway's objects, or the answer to our own create was lost
        await self._apply(apply, holder)

    async def _create(self, apply: Apply) -> bool:
        """Make what should not exist yet in one call; False when somebody has the name."""
        manifest = apply.manifest
        self._fence()
        if manifest.kind == SECRET:
            secret = await create_secret(self._kube, manifest)
            if secret is not None:
                self._remember(SECRET, secret)
            return secret is not None
        try:
            answer = await self._kube.create(
                manifest.kind, manifest.namespace, manifest.body, manager=MANAGER
            )
        except ConflictError:
            return False
        self._remember(manifest.kind, answer)
        return True

    async def _apply(self, apply: Apply, holder: Holder) -> None:
        if holder is Holder.STRANGER:
            return
        manifest = apply.manifest
        if manifest.kind == SECRET:
            self._fence()
            self._remember(SECRET, await mend_secret(self._kube, manifest, uid=apply.uid))
            return
        body = dict(manifest.body)
        if apply.uid is not None:
            body["metadata"] = {**body["metadata"], "uid": apply.uid}
        if apply.adopt:
            await self._adopt(apply)
        self._fence()
        # What is not there yet is applied without force: should a stranger take the name in this very moment, the
        # API server refuses, and the next round finds the stranger.
        answer = await self._kube.apply(
            manifest.kind,
            manifest.namespace,
            manifest.name,
            body,
            manager=MANAGER,
            force=holder is Holder.OURS,
        )
        self._remember(manifest.kind, answer)

    async def _adopt(self, apply: Apply) -> None:
        """Note the fields of a create as applied ones, so that the apply removes what the manifest no longer has."""
        manifest = apply.manifest
        live = await self._kube.get(manifest.kind, manifest.namespace, manifest.name)
        metadata = live["metadata"]
        noted = adopt_fields(metadata.get("managedFields") or ())
        if metadata["uid"] != apply.uid or noted is None:
            return
        patch = {"resourceVersion": metadata["resourceVersion"], "managedFields": noted}
        self._fence()
        await self._kube.merge(
            manifest.kind, manifest.namespace, manifest.name, {"metadata": patch}, manager=MANAGER
        )

    async def _find_existing(self, apply: Apply) -> Mapping[str, Any] | None:
        """Who has the name of an object that should not exist yet."""
        if not apply.is_new:
            return None
        manifest = apply.manifest
        if manifest.kind == SECRET:
            return await find_secret(self._kube, manifest)
        try:
            existing = await self._kube.get(manifest.kind, manifest.namespace, manifest.name)
        except NotFoundError:
            return None
        self._remember(manifest.kind, existing)
        return existing

    def _find_holder(self, apply: Apply, existing: Mapping[str, Any] | None) -> Holder:
        if not apply.is_new:
            return Holder.OURS
        if existing is None:
            return Holder.NOBODY
        owners = {owner["uid"] for owner in existing["metadata"].get("ownerReferences") or ()}
        wanted = {owner["uid"] for owner in apply.manifest.body["metadata"]["ownerReferences"]}
        return Holder.OURS if owners & wanted else Holder.STRANGER

    async def _mark(self, pool: PoolMetadata, mark: MarkPod) -> None:
        metadata = {"uid": mark.uid, "labels": dict(mark.labels), "annotations": dict(mark.annotations)}
        self._fence()
        try:
            answer = await self._kube.merge(
                POD, pool.namespace, mark.name, {"metadata": metadata}, manager=MANAGER
            )
        except NotFoundError:
            return  # it left by itself
        self._remember(POD, answer)

    async def _delete(self, pool: PoolMetadata, action: Delete) -> None:
        self._fence()
        await self._kube.delete(action.kind, pool.namespace, action.name, uid=action.uid)

    async def _set_finalizer(self, pool: PoolMetadata, *, present: bool) -> None:
        body = {
            "apiVersion": POOL.api_version,
            "kind": POOL.name,
            # The uid keeps the apply from making a new pool where this one is gone.
            "metadata": {"name": pool.name, "uid": pool.uid}
            | ({"finalizers": [FINALIZER]} if present else {}),
        }
        self._fence()
        try:
            answer = await self._kube.apply(
                POOL, pool.namespace, pool.name, body, manager=MANAGER, force=True
            )
        except NotFoundError:
            return
        self._remember(POOL, answer)


def find_digest(obj: Mapping[str, Any]) -> str:
    """Digest of the manifest that an object was last written from; empty where the operator did not write it."""
    return str((obj["metadata"].get("annotations") or {}).get(APPLIED_DIGEST) or "")


async def finish_all(works: list[Coroutine[Any, Any, T]]) -> list[T]:
    """Do independent works together; every one has ended before the first failure is raised, so none is left behind."""
    answers = await asyncio.gather(*works, return_exceptions=True)
    done: list[T] = []
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
        done.append(answer)
    return done
