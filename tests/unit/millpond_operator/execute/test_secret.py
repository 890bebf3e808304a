"""The Secret with the gateways' key: made once by name, never replaced, never read back."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from typing import Any

from tests.support.operator_builders import NOW, SETTINGS, make_pool, make_snapshot

from millpond_common.contract import labels
from millpond_operator.desired.kinds import SECRET
from millpond_operator.errors import ConflictError, NotFoundError
from millpond_operator.execute.executor import Executor
from millpond_operator.observe.parse import parse_child
from millpond_operator.plan.actions import Apply, Delete
from millpond_operator.plan.planner import plan
from millpond_operator.plan.snapshot import PoolSnapshot, SiblingPool

POOL = make_pool(replicas=1)


class Kube:
    """An API server that holds at most one Secret and knows who set its fields."""

    def __init__(self, secret: dict[str, Any] | None = None) -> None:
        self.secret = secret
        self.managers: set[str] = set()
        self.calls: list[str] = []

    async def get_metadata(self, kind: Any, _namespace: str, name: str) -> dict[str, Any]:
        self.calls.append("get")
        assert (kind, name) == (SECRET, labels.GATEWAY_NAME)
        if self.secret is None:
            raise NotFoundError(name)
        return {"metadata": self.secret["metadata"]}

    async def apply(
        self, _kind: Any, _namespace: str, _name: str, body: dict[str, Any], *, manager: str, force: bool
    ) -> dict[str, Any]:
        self.calls.append("apply")
        await asyncio.sleep(0)
        assert not force
        if self.secret is not None and manager not in self.managers:
            raise ConflictError("data.key is another manager's")
        self.managers.add(manager)
        self.secret = {**body, "metadata": {**body["metadata"], "uid": "uid-secret"}}
        return self.secret

    async def merge(
        self, _kind: Any, _namespace: str, _name: str, body: dict[str, Any], *, manager: str
    ) -> dict[str, Any]:
        self.calls.append("merge")
        assert set(body) == {"metadata"}
        assert self.secret is not None
        self.secret = {**self.secret, "metadata": {**self.secret["metadata"], **body["metadata"]}}
        return self.secret


def see(secret: dict[str, Any] | None, **changes: Any) -> PoolSnapshot:
    children = (parse_child(SECRET, secret),) if secret is not None else ()
    snapshot = make_snapshot(POOL)
    known = {"sees_gateway_key": True, "gateway_pools": (SiblingPool("pool", POOL.metadata.uid),), **changes}
    return replace(snapshot, children=(*snapshot.children, *children), **known)


def find_secret_actions(snapshot: PoolSnapshot) -> list[Any]:
    return [
        action
        for action in plan(snapshot, SETTINGS, NOW).actions
        if (isinstance(action, Apply) and action.manifest.kind == SECRET)
        or (isinstance(action, Delete) and action.kind == SECRET)
    ]


async def run(kube: Kube, snapshot: PoolSnapshot) -> list[dict[str, Any]]:
    remembered: list[dict[str, Any]] = []
    executor = Executor(
        kube,  # type: ignore[arg-type]
        fence=lambda: None,
        remember=lambda _kind, obj: remembered.append(dict(obj)),
    )
    await executor.run(snapshot.pool.metadata, find_secret_actions(snapshot))
    return remembered


def read_key(kube: Kube) -> str:
    assert kube.secret is not None
    return base64.b64decode(kube.secret["data"]["key"]).decode()


async def test_a_key_is_made_once_and_goes_nowhere_else() -> None:
    kube = Kube()
    remembered = await run(kube, see(None))
    key = read_key(kube)
    assert len(bytes.fromhex(key)) == 32
    assert kube.calls == ["apply"], "a create cannot be allowed by name"
    assert [set(obj) for obj in remembered] == [{"metadata"}]
    assert find_secret_actions(see(kube.secret)) == []
    assert {manager.startswith(f"{labels.MANAGER}-") for manager in kube.managers} == {True}


async def test_two_pools_that_make_it_at_once_leave_one_key() -> None:
    kube = Kube()
    await asyncio.gather(*(run(kube, see(None)) for _ in range(3)))
    assert len(kube.managers) == 1
    assert "merge" not in kube.calls


async def test_its_owners_follow_the_pools_and_its_key_stays() -> None:
    kube = Kube()
    await run(kube, see(None))
    key = read_key(kube)
    more = see(kube.secret, gateway_pools=(SiblingPool("pool", POOL.metadata.uid), SiblingPool("b", "uid-b")))
    (action,) = find_secret_actions(more)
    assert action.uid == "uid-secret"
    await run(kube, more)
    assert read_key(kube) == key
    assert kube.secret is not None
    assert {owner["uid"] for owner in kube.secret["metadata"]["ownerReferences"]} == {
        POOL.metadata.uid,
        "uid-b",
    }
    again = replace(see(kube.secret), gateway_pools=more.gateway_pools)
    assert find_secret_actions(again) == []


async def test_a_key_that_a_user_renewed_is_left_alone() -> None:
    kube = Kube()
    await run(kube, see(None))
    assert kube.secret is not None
    kube.secret["data"] = {"key": base64.b64encode(b"x" * 32).decode()}
    assert find_secret_actions(see(kube.secret)) == []


def test_a_stranger_s_secret_is_named_and_not_written() -> None:
    stranger = {"metadata": {"name": labels.GATEWAY_NAME, "namespace": "ns", "uid": "u"}}
    assert find_secret_actions(see(stranger)) == []


def test_without_the_right_to_look_nothing_is_planned() -> None:
    assert find_secret_actions(see(None, sees_gateway_key=False)) == []


async def test_it_goes_with_the_gateway() -> None:
    kube = Kube()
    await run(kube, see(None))
    (action,) = find_secret_actions(replace(see(kube.secret), gateway_pools=()))[-1:]
    assert action == Delete(
        SECRET, labels.GATEWAY_NAME, "uid-secret", "no pool of the namespace wants the gateway"
    )
