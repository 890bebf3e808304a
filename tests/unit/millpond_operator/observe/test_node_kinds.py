"""Kinds of nodes are listed when an unknown one is met, and no more often."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from millpond_operator.desired.kinds import NODE, Kind
from millpond_operator.errors import ForbiddenError
from millpond_operator.observe.node_kinds import PAUSE_FAILED_SECONDS, PAUSE_SECONDS, NodeKinds


@dataclass
class Listed:
    items: list[dict[str, Any]]


@dataclass
class Kube:
    names: list[str] = field(default_factory=lambda: ["a"])
    allowed: bool = True
    num_lists: int = 0
    now: float = 1_000.0

    async def list(self, kind: Kind, namespace: str | None) -> Listed:
        assert (kind, namespace) == (NODE, None)
        self.num_lists += 1
        await asyncio.sleep(0)
        if not self.allowed:
            raise ForbiddenError("nodes is forbidden")
        labels = {"node.kubernetes.io/instance-type": "a3", "topology.kubernetes.io/zone": "z1"}
        return Listed([{"metadata": {"name": name, "labels": labels}} for name in self.names])


def make(kube: Kube, *, enabled: bool = True) -> NodeKinds:
    return NodeKinds(kube, lambda: kube.now, enabled=enabled)  # type: ignore[arg-type]


async def test_nodes_are_listed_once_and_again_for_a_new_one() -> None:
    kube = Kube()
    kinds = make(kube)
    await kinds.refresh(set())
    assert kube.num_lists == 0, "nobody runs anywhere"
    for _ in range(3):
        await kinds.refresh({"a"})
    assert (kinds.get(), kube.num_lists) == ({"a": "a3"}, 1)
    kube.names.append("b")
    await kinds.refresh({"a", "b"})
    assert kube.num_lists == 1, "not at once again"
    kube.now += PAUSE_SECONDS
    await kinds.refresh({"a", "b"})
    assert (set(kinds.get()), kube.num_lists) == ({"a", "b"}, 2)
    assert kinds.get_zones() == {"a": "z1", "b": "z1"}


async def test_pools_that_ask_at_once_share_one_list() -> None:
    kube = Kube()
    kinds = make(kube)
    await asyncio.gather(*(kinds.refresh({"a"}) for _ in range(5)))
    assert (kinds.get(), kube.num_lists) == ({"a": "a3"}, 1)


async def test_where_nodes_may_not_be_seen_all_are_one_kind_and_nobody_insists() -> None:
    kube = Kube(allowed=False)
    kinds = make(kube)
    for _ in range(3):
        await kinds.refresh({"a"})
    assert (kinds.get(), kube.num_lists) == ({}, 1)
    kube.now += PAUSE_FAILED_SECONDS
    await kinds.refresh({"a"})
    assert kube.num_lists == 2
    off = make(Kube(), enabled=False)
    await off.refresh({"a"})
    assert off.get() == {}
