"""The watch against a source that loses events, hangs, expires and refuses."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import pytest

from millpond_gateway.world.watch import Object, Watcher, WatchError, WatchExpiredError, WatchSettings

SETTINGS = WatchSettings(
    resync_seconds=0.4, silence_seconds=0.3, min_pause_seconds=0.01, max_pause_seconds=0.05
)


class FakeSource:
    """A kind whose server can lose events, hang, expire or refuse."""

    name = "things"

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.version = 1
        self.num_lists = 0
        self.num_watches = 0
        self.mode = "good"
        self._events: asyncio.Queue[bytes | None] = asyncio.Queue()

    def set(self, name: str, *, lose: bool = False) -> None:
        kind = "MODIFIED" if name in self.objects else "ADDED"
        self.version += 1
        self.objects[name] = {"metadata": {"name": name, "resourceVersion": str(self.version)}}
        self._tell(kind, self.objects[name], lose=lose)

    def delete(self, name: str, *, lose: bool = False) -> None:
        self.version += 1
        gone = self.objects.pop(name)
        gone["metadata"]["resourceVersion"] = str(self.version)
        self._tell("DELETED", gone, lose=lose)

    def bookmark(self) -> None:
        self._tell("BOOKMARK", {"metadata": {"resourceVersion": str(self.version)}})

    def end_watch(self) -> None:
        self._events.put_nowait(None)

    def send(self, line: bytes) -> None:
        self._events.put_nowait(line)

    def _tell(self, kind: str, obj: dict[str, Any], *, lose: bool = False) -> None:
        if not lose:
            self.send(json.dumps({"type": kind, "object": obj}).encode())

    async def list_all(self) -> tuple[list[Object], str]:
        self.num_lists += 1
        if self.mode == "refuse":
            raise WatchError("403")
        if self.mode == "hang":
            await asyncio.Event().wait()
        self._events = asyncio.Queue()
        return list(self.objects.values()), str(self.version)

    async def watch_from(self, version: str, seconds: float) -> AsyncGenerator[bytes, None]:
        self.num_watches += 1
        if self.mode == "expire":
            self.mode = "good"
            raise WatchExpiredError("410")
        while True:
            line = await self._events.get()
            if line is None:
                return
            yield line


class FakeStore:
    def __init__(self) -> None:
        self.names: set[str] = set()
        self.num_proofs = 0

    def replace(self, objects: list[Object]) -> None:
        self.names = {obj["metadata"]["name"] for obj in objects}

    def put(self, obj: Object) -> None:
        self.names.add(obj["metadata"]["name"])

    def remove(self, obj: Object) -> None:
        self.names.discard(obj["metadata"]["name"])

    def prove(self) -> None:
        self.num_proofs += 1


@pytest.fixture
async def watched() -> AsyncIterator[tuple[FakeSource, FakeStore]]:
    source, store = FakeSource(), FakeStore()
    source.set("a")
    watcher = Watcher(source, store, SETTINGS, clock=asyncio.get_running_loop().time, jitter=lambda: 0.5)
    task = asyncio.create_task(watcher.run())
    await until(lambda: source.num_watches == 1)
    yield source, store
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(3):
        while not condition():
            await asyncio.sleep(0.005)


Watched = tuple[FakeSource, FakeStore]


async def test_events_are_followed_as_they_come(watched: Watched) -> None:
    source, store = watched
    source.set("b")
    await until(lambda: store.names == {"a", "b"})
    source.delete("a")
    await until(lambda: store.names == {"b"})
    assert source.num_lists == 1


async def test_gw_021_gw_028_gw_031_a_lost_event_is_repaired_within_one_resync(watched: Watched) -> None:
    source, store = watched
    began = asyncio.get_running_loop().time()
    source.set("b", lose=True)
    source.delete("a", lose=True)
    await until(lambda: store.names == {"b"})
    assert asyncio.get_running_loop().time() - began < SETTINGS.resync_seconds + 0.3


async def test_a_watch_that_ends_is_resumed_without_a_list(watched: Watched) -> None:
    source, _ = watched
    source.end_watch()
    await until(lambda: source.num_watches == 2)
    assert source.num_lists == 1


async def test_gw_021_a_watch_that_expired_lists_again(watched: Watched) -> None:
    source, store = watched
    source.delete("a", lose=True)
    source.mode = "expire"
    source.end_watch()
    await until(lambda: store.names == set())
    assert source.num_lists == 2


async def test_an_expiry_inside_the_watch_lists_again(watched: Watched) -> None:
    source, store = watched
    source.delete("a", lose=True)
    source.send(json.dumps({"type": "ERROR", "object": {"code": 410, "message": "too old"}}).encode())
    await until(lambda: store.names == set())


async def test_a_silent_watch_is_taken_for_dead_and_bookmarks_keep_it(watched: Watched) -> None:
    source, store = watched
    for _ in range(3):
        await asyncio.sleep(0.1)
        source.bookmark()
    assert source.num_lists == 1
    assert store.num_proofs >= 3
    await until(lambda: source.num_lists >= 2)


async def test_gw_033_refusals_are_backed_off_and_heal(watched: Watched) -> None:
    source, store = watched
    source.mode = "refuse"
    source.send(b"not json")
    await asyncio.sleep(0.4)
    assert store.names == {"a"}  # the last view goes on serving
    assert 2 <= source.num_lists <= 40
    source.mode = "good"
    source.set("b")
    await until(lambda: store.names == {"a", "b"})


async def test_a_list_that_hangs_is_given_up(watched: Watched) -> None:
    source, store = watched
    source.mode = "hang"
    source.send(b"{}")
    await until(lambda: source.num_lists >= 3)
    source.mode = "good"
    source.set("b")
    await until(lambda: store.names == {"a", "b"})
