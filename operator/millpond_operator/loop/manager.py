"""One task per pool, woken by marks and timers; errors back off with jitter, pools never wait for one another."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from time import monotonic

import structlog

from millpond_operator.errors import KubeError, NotLeaderError, ThrottledError
from millpond_operator.loop.metrics import Metrics
from millpond_operator.loop.reconciler import Outcome

LOG = structlog.get_logger(__name__)
Key = tuple[str, str]
FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 60.0
MAX_QUIET_SECONDS = 30.0
"""Longest time between two looks at a pool that is not settled and about which nothing happens."""
NOT_LEADER_SECONDS = 0.5
"""Pause after a write that the Lease forbade; the task then waits until this instance leads again."""
SPACING_SECONDS = 0.2
"""Least time between two rounds of a pool: controllers tell one change in many events, which one look answers."""
MAX_IMMEDIATE_ROUNDS = 3
"""Rounds that follow at once on a round with writes; more in a row are slowed down like errors."""


class PoolTask:
    """The loop of one pool."""

    def __init__(self, key: Key, manager: Manager) -> None:
        self.key = key
        self._manager = manager
        self._dirty = asyncio.Event()
        self._dirty.set()
        self._failures = 0
        self._busy_rounds = 0
        self._quiet_rounds = 0
        self._started_at = float("-inf")
        self.task = asyncio.create_task(self._run(), name=f"pool {key[0]}/{key[1]}")

    def mark(self) -> None:
        """Something about the pool changed."""
        self._dirty.set()

    async def _run(self) -> None:
        delay: float | None = 0.0
        while delay is not None:
            with contextlib.suppress(TimeoutError):
                # Not wait_for: before Python 3.12 it can lose a cancellation that meets a mark.
                async with asyncio.timeout(delay):
                    await self._dirty.wait()
            await self._manager.wait_until_allowed()
            await asyncio.sleep(max(0.0, self._started_at + self._manager.spacing_seconds - monotonic()))
            self._dirty.clear()
            delay = await self._round()
        self._manager.drop(self)

    async def _round(self) -> float | None:
        metrics = self._manager.metrics
        async with self._manager.slots:
            self._started_at = started = monotonic()
            try:
                outcome = await self._manager.reconcile(*self.key)
                metrics.reconciles.labels("Done").inc()
            except NotLeaderError:
                metrics.reconciles.labels("NotLeader").inc()
                return NOT_LEADER_SECONDS
            except KubeError as error:
                metrics.reconciles.labels("Error").inc()
                return self._back_off(error)
            except Exception:
                # One pool's bug must not end the others: it is logged whole and retried slowly.
                metrics.reconciles.labels("Error").inc()
                LOG.exception("reconcile failed", namespace=self.key[0], pool=self.key[1])
                self._failures = max(self._failures, 6)
                return self._compute_backoff()
            finally:
                metrics.reconcile_seconds.observe(monotonic() - started)
        self._failures = 0
        return None if outcome is None else self._pace(outcome)

    def _back_off(self, error: KubeError) -> float:
        delay = self._compute_backoff()
        if isinstance(error, ThrottledError):
            delay = max(delay, error.retry_after_seconds)
        level = LOG.debug if self._failures <= 1 else LOG.warning
        level("retrying", namespace=self.key[0], pool=self.key[1], seconds=round(delay, 2), error=str(error))
        return delay

    def _compute_backoff(self) -> float:
        limit = min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2**self._failures)
        self._failures = min(self._failures + 1, 16)
        return random.uniform(limit / 2, limit)  # noqa: S311 - jitter, not a secret

    def _pace(self, outcome: Outcome) -> float:
        """Follow writes at once, but not for ever; look less and less often while nothing happens."""
        if outcome.recheck_seconds > 0:
            self._busy_rounds = 0
            self._quiet_rounds = 0 if outcome.wrote else self._quiet_rounds + 1
            slower = min(MAX_QUIET_SECONDS, outcome.recheck_seconds * 1.5 ** min(self._quiet_rounds, 16))
            return max(outcome.recheck_seconds, slower)
        self._quiet_rounds = 0
        self._busy_rounds += 1
        excess = self._busy_rounds - MAX_IMMEDIATE_ROUNDS
        return 0.0 if excess <= 0 else min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0**excess)


class Manager:
    """All pools' tasks."""

    def __init__(
        self,
        reconcile: Callable[[str, str], Awaitable[Outcome | None]],
        *,
        metrics: Metrics,
        may_write: asyncio.Event,
        is_synced: asyncio.Event,
        max_parallel: int = 16,
        spacing_seconds: float = SPACING_SECONDS,
    ) -> None:
        self.reconcile = reconcile
        self.metrics = metrics
        self.slots = asyncio.Semaphore(max_parallel)
        self.spacing_seconds = spacing_seconds
        self._may_write = may_write
        self._is_synced = is_synced
        self._tasks: dict[Key, PoolTask] = {}
        self._closed = False

    def mark(self, namespace: str, name: str) -> None:
        """Have the pool looked at soon."""
        if self._closed:
            return
        task = self._tasks.get((namespace, name))
        if task is None:
            self._tasks[(namespace, name)] = PoolTask((namespace, name), self)
            self.metrics.pools.set(len(self._tasks))
        else:
            task.mark()

    def drop(self, task: PoolTask) -> None:
        """Forget the task of a pool that is gone."""
        if self._tasks.get(task.key) is task:
            del self._tasks[task.key]
            self.metrics.pools.set(len(self._tasks))

    async def wait_until_allowed(self) -> None:
        """Wait for the first full lists and for the Lease."""
        await self._is_synced.wait()
        await self._may_write.wait()

    async def close(self) -> None:
        """Let reconciles under way end, then stop all tasks."""
        self._closed = True
        tasks = [task.task for task in self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
