"""List and watch of one kind in one namespace, for as long as the gateway lives.

    list (all of it, replaces the kind) -> watch from there -> resume on a clean end
                 ^                                  |
                 +--- 410, error, silence, resync --+

A watch that says nothing, not even a bookmark, for `silence_seconds` is taken for dead. Whatever happens, the
kind is listed again every `resync_seconds`: a lost event cannot outlive that.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

Object = Mapping[str, Any]
_log = structlog.get_logger("world")


class WatchError(Exception):
    """The API server refused or broke off; the watch begins again after a pause."""


class WatchExpiredError(WatchError):
    """The version to resume from is too old (410): only a new list helps."""


class Source(Protocol):
    """Access to one kind in one namespace."""

    name: str

    async def list_all(self) -> tuple[list[Object], str]:
        """All objects, and the version they were listed at.

        Raises:
            WatchError: refused or unreachable.
        """

    def watch_from(self, version: str, seconds: float) -> AsyncGenerator[bytes, None]:
        """Lines of a watch, one event each; it ends by itself after about `seconds`.

        Raises:
            WatchError: refused, unreachable or broken off.
        """


class Store(Protocol):
    """Where objects go."""

    def replace(self, objects: list[Object]) -> None:
        """All objects of the kind."""

    def put(self, obj: Object) -> None:
        """One object, new or changed."""

    def remove(self, obj: Object) -> None:
        """One object, deleted."""

    def prove(self) -> None:
        """The source is alive."""


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """Times of a watch, in seconds."""

    resync_seconds: float = 60.0
    """A full list at least this often."""
    silence_seconds: float = 90.0
    """Bookmarks come about once a minute; a watch silent for longer is dead."""
    min_pause_seconds: float = 0.5
    max_pause_seconds: float = 15.0


class Watcher:
    """Keeps a store in step with a source; `run` ends only by cancellation."""

    def __init__(
        self,
        source: Source,
        store: Store,
        settings: WatchSettings,
        *,
        clock: Callable[[], float],
        jitter: Callable[[], float],
    ) -> None:
        self._source = source
        self._store = store
        self._settings = settings
        self._clock = clock
        self._jitter = jitter
        self._version: str | None = None
        self._listed_at = 0.0
        self._failures = 0

    async def run(self) -> None:
        """List and watch, again and again."""
        while True:
            try:
                await self._follow()
            except WatchExpiredError:
                self._version = None
                await asyncio.sleep(self._settings.min_pause_seconds * self._jitter())
            except WatchError as error:
                self._version = None  # what was missed meanwhile shows only in a list
                self._failures += 1
                _log.warning(
                    "watch failed", kind=self._source.name, error=str(error), failures=self._failures
                )
                await asyncio.sleep(self._compute_pause())

    def _compute_pause(self) -> float:
        settings = self._settings
        pause: float = min(
            settings.max_pause_seconds, settings.min_pause_seconds * 2 ** min(self._failures - 1, 10)
        )
        return pause * (0.5 + self._jitter())

    async def _follow(self) -> None:
        left = self._listed_at + self._settings.resync_seconds - self._clock()
        if self._version is None or left <= 0:
            await self._relist()
            left = self._settings.resync_seconds
        assert self._version is not None
        lines = self._source.watch_from(self._version, left)
        try:
            async with asyncio.timeout(left + self._settings.min_pause_seconds), aclosing(lines):
                await self._read(lines)
        except TimeoutError:
            return  # time for the next list; a watch that hung is repaired by it

    async def _relist(self) -> None:
        try:
            async with asyncio.timeout(self._settings.silence_seconds):
                objects, self._version = await self._source.list_all()
        except TimeoutError as error:
            raise WatchError("the list did not arrive in time") from error
        self._listed_at = self._clock()
        self._store.replace(objects)
        self._store.prove()

    async def _read(self, lines: AsyncGenerator[bytes, None]) -> None:
        while True:
            try:
                async with asyncio.timeout(self._settings.silence_seconds):
                    line = await anext(lines, None)
            except TimeoutError as error:
                raise WatchError("the watch fell silent") from error
            if line is None:
                return
            self._apply(line)

    def _apply(self, line: bytes) -> None:
        try:
            event = json.loads(line)
            kind, obj = event["type"], event["object"]
        except (ValueError, KeyError, TypeError) as error:
            raise WatchError(f"not a watch event: {error}") from error
        if kind == "ERROR":
            if obj.get("code") == 410:
                raise WatchExpiredError(obj.get("message", "expired"))
            raise WatchError(obj.get("message", "the watch ended with an error"))
        self._version = obj["metadata"]["resourceVersion"]
        if kind in {"ADDED", "MODIFIED"}:
            self._store.put(obj)
        elif kind == "DELETED":
            self._store.remove(obj)
        self._failures = 0
        self._store.prove()  # a bookmark does no more than this
