"""Compiling off the event loop and off the engine thread: bounded in number and time, fair between tenants.

A request waits here, before it is scheduled, for nobody's grammar but its own tenant's and those that were asked for
before: each tenant compiles one at a time, and the tenants take turns for the threads.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from millpond_engine.engine.step import Masker
from millpond_engine.grammar.cache import GrammarCache
from millpond_engine.grammar.spec import GrammarBusyError, GrammarError, GrammarSpec, clean_message
from millpond_engine.records.grammar import Grammar


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Bounds of one engine."""

    num_threads: int = 2
    max_waiting: int = 128
    """Requests whose grammar is not ready; beyond it new ones are told to come back."""
    max_waiting_per_tenant: int = 32
    compile_seconds: float = 10.0
    """A grammar that takes longer is refused; the thread ends by the library's own bounds of work."""
    max_bytes: int = 64 << 20
    max_grammars: int = 512


class Compiler(Protocol):
    """What compiles; blocks."""

    def compile(self, spec: GrammarSpec, *, vocabulary: int, ends: tuple[int, ...]) -> Grammar:
        """Compile, or raise a GrammarError."""
        ...


class Library(Compiler, Masker, Protocol):
    """What compiles, and knows the masks of what it has compiled."""


class GrammarService:
    """Owned by the event loop."""

    def __init__(self, library: Library, limits: GrammarLimits | None = None) -> None:
        self.masker: Masker = library
        self._library = library
        self._limits = limits or GrammarLimits()
        self._cache = GrammarCache(max_bytes=self._limits.max_bytes, max_grammars=self._limits.max_grammars)
        """Failures too, by their message: asking again costs nothing."""
        self._executor = ThreadPoolExecutor(self._limits.num_threads, thread_name_prefix="grammar")
        self._threads = asyncio.Semaphore(self._limits.num_threads)
        self._lanes: dict[str, asyncio.Lock] = {}
        self._waiting = Counter[str]()

    @property
    def num_kept(self) -> int:
        """Grammars and failures that the cache holds."""
        return len(self._cache)

    async def get(self, spec: GrammarSpec, *, tenant: str, vocabulary: int, ends: tuple[int, ...]) -> Grammar:
        """The compiled grammar, from the cache or after waiting for it.

        Raises:
            GrammarError: it cannot be compiled, or not in time.
            GrammarBusyError: too many wait already.
        """
        kept = self._cache.get(tenant, spec)
        if kept is None:
            async with self._take_turn(tenant):
                kept = self._cache.get(tenant, spec)  # the one before may have asked for the same
                if kept is None:
                    kept = await self._compile(tenant, spec, vocabulary, ends)
        if isinstance(kept, str):
            raise GrammarError(kept)
        return kept

    def close(self) -> None:
        """Compile nothing more."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def _take_turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for the tenant's own lane."""
        limits = self._limits
        if (
            self._waiting.total() >= limits.max_waiting
            or self._waiting[tenant] >= limits.max_waiting_per_tenant
        ):
            raise GrammarBusyError(f"{self._waiting.total()} grammars wait to be compiled; try again")
        self._waiting[tenant] += 1
        lane = self._lanes.setdefault(tenant, asyncio.Lock())
        try:
            async with lane:
                yield
        finally:
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant], self._lanes[tenant]

    async def _compile(
        self, tenant: str, spec: GrammarSpec, vocabulary: int, ends: tuple[int, ...]
    ) -> Grammar | str:
        """Compile on a thread, which keeps its place until it is done, however long the request waits."""
        seconds = self._limits.compile_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._threads.acquire()
        except TimeoutError:
            raise GrammarBusyError(
                f"no grammar was ready to be compiled within {seconds:g} s; try again"
            ) from None
        loop = asyncio.get_running_loop()
        try:
            done = loop.run_in_executor(self._executor, self._try, spec, vocabulary, ends)
        except BaseException:
            self._threads.release()
            raise
        done.add_done_callback(lambda future: self._book(tenant, spec, future))
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(done)
        except TimeoutError:
            return f"it takes more than {seconds:g} s to compile; make it smaller"

    def _book(self, tenant: str, spec: GrammarSpec, done: asyncio.Future[Grammar | str]) -> None:
        self._threads.release()
        if not done.cancelled() and done.exception() is None:
            self._cache.put(tenant, spec, done.result())

    def _try(self, spec: GrammarSpec, vocabulary: int, ends: tuple[int, ...]) -> Grammar | str:
        try:
            return self._library.compile(spec, vocabulary=vocabulary, ends=ends)
        except GrammarError as error:
            return str(error)
        except ValueError as error:  # of the library, for a text it cannot take
            return clean_message(str(error))
        except BaseException as error:
            if (
                type(error).__name__ != "PanicException"
            ):  # pyo3's, for a defect of the library met by this grammar
                raise
            return "the grammar library failed at it; write it in another way"
