"""A fake engine in virtual time: prefills one prompt after another, keeps an LRU of blocks, decodes in parallel.

The rules are those of the replay model: FIFO prefill at a fixed speed plus a fixed cost, an LRU prefix cache
matched when the prefill begins, and decode steps that grow with the batch. No chunked prefill, no interference
of decode with prefill.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

import msgspec

from millpond_simulator.clock import Clock


class EngineModel(msgspec.Struct, frozen=True, kw_only=True):
    """Cost model of one replica."""

    tokens_per_second: float = 20_000.0
    prefill_seconds: float = 0.010
    """Fixed cost of each prefill."""
    num_blocks: int = 1000
    block_tokens: int = 512
    step_seconds: float = 0.012
    step_seconds_per_sequence: float = 0.0001


class Job(msgspec.Struct, kw_only=True, eq=False):
    """One request inside an engine, with what happened to it."""

    keys: Sequence[int]
    num_tokens: int
    output_tokens: int
    on_first_token: Callable[[Job], None]
    on_end: Callable[[Job], None]
    cached_tokens: int = 0
    failed: bool = False


class FakeEngine:
    """One replica."""

    def __init__(self, uid: str, model: EngineModel, clock: Clock) -> None:
        self.uid = uid
        self.model = model
        self._clock = clock
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._waiting: deque[Job] = deque()
        self._jobs: dict[int, Job] = {}
        self._life = 0
        self._prefilling = False
        self._num_decoding = 0
        self.busy_seconds = 0.0

    @property
    def num_cached_blocks(self) -> int:
        """Blocks in the prefix cache."""
        return len(self._cache)

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._jobs)

    def submit(self, job: Job) -> None:
        """Take a request."""
        self._jobs[id(job)] = job
        self._waiting.append(job)
        self._begin_next()

    def restart(self) -> None:
        """Lose everything: cache, queue and running requests, which end failed."""
        self._life += 1
        self._cache.clear()
        self._waiting.clear()
        self._prefilling = False
        self._num_decoding = 0
        jobs, self._jobs = list(self._jobs.values()), {}
        for job in jobs:
            job.failed = True
            job.on_end(job)

    def _begin_next(self) -> None:
        if self._prefilling or not self._waiting:
            return
        job = self._waiting.popleft()
        self._prefilling = True
        job.cached_tokens = min(self._match(job.keys) * self.model.block_tokens, job.num_tokens - 1)
        seconds = (job.num_tokens - job.cached_tokens) / self.model.tokens_per_second
        seconds += self.model.prefill_seconds
        self.busy_seconds += seconds
        self._later(seconds, lambda: self._end_prefill(job))

    def _end_prefill(self, job: Job) -> None:
        self._prefilling = False
        self._store(job.keys)
        self._num_decoding += 1
        job.on_first_token(job)
        per_step = self.model.step_seconds + self.model.step_seconds_per_sequence * self._num_decoding
        self._later(max(job.output_tokens - 1, 0) * per_step, lambda: self._end(job))
        self._begin_next()

    def _end(self, job: Job) -> None:
        self._num_decoding -= 1
        del self._jobs[id(job)]
        job.on_end(job)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        life = self._life
        self._clock.after(seconds, lambda: action() if life == self._life else None)

    def _match(self, keys: Sequence[int]) -> int:
        num_hits = 0
        for key in keys:
            if key not in self._cache:
                break
            num_hits += 1
        return num_hits

    def _store(self, keys: Sequence[int]) -> None:
        for key in reversed(keys[: self.model.num_blocks]):  # the head is the newest, so a tail goes first
            self._cache.pop(key, None)
            self._cache[key] = None
        while len(self._cache) > self.model.num_blocks:
            self._cache.popitem(last=False)
