"""Who else sets a pool's count."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from millpond_operator.desired.kinds import Kind
from millpond_operator.errors import ForbiddenError
from millpond_operator.observe.scalers import KEEP_FAILED_SECONDS, ScalerWatcher

HPA = {
    "metadata": {"name": "theirs"},
    "spec": {
        "scaleTargetRef": {"apiVersion": "millpond.dev/v1alpha1", "kind": "InferencePool", "name": "smol"}
    },
}


@dataclass
class Listed:
    items: list[dict[str, Any]]


@dataclass
class Kube:
    calls: list[str | None] = field(default_factory=list)
    is_forbidden: bool = False

    async def list(self, kind: Kind, namespace: str | None) -> Listed:
        self.calls.append(namespace)
        await asyncio.sleep(0)
        if self.is_forbidden:
            raise ForbiddenError("no")
        return Listed([HPA])


async def test_pools_that_have_their_turn_together_cause_one_list() -> None:
    kube, now = Kube(), [100.0]
    watcher = ScalerWatcher(kube, lambda: now[0], keep_seconds=30.0)  # type: ignore[arg-type]
    await asyncio.gather(*(watcher.refresh("ns") for _ in range(20)), watcher.refresh("other"))
    assert sorted(str(name) for name in kube.calls) == ["ns", "other"]
    assert watcher.get_names("ns", "smol") == ("theirs",)
    now[0] += 31.0
    async with asyncio.TaskGroup() as group:
        group.create_task(watcher.refresh("ns"))
        await asyncio.sleep(0)
        assert watcher.get_names("ns", "smol") == ("theirs",), "what was known stays while it is asked again"
    assert kube.calls.count("ns") == 2


async def test_a_refusal_is_not_repeated_each_time() -> None:
    kube, now = Kube(is_forbidden=True), [100.0]
    watcher = ScalerWatcher(kube, lambda: now[0], keep_seconds=30.0)  # type: ignore[arg-type]
    await watcher.refresh("ns")
    now[0] += KEEP_FAILED_SECONDS - 1
    await watcher.refresh("ns")
    assert kube.calls == ["ns"]
