"""Asks every engine for its state, lightly: epoch, block counts, speed, and for static endpoints readiness."""

from __future__ import annotations

import asyncio
import random

import msgspec
import structlog

from millpond_common.contract.engine_state import EngineState, parse_engine_state
from millpond_gateway.app.foreign import ForeignFacts, read_foreign
from millpond_gateway.proxy.connections import Connections
from millpond_gateway.proxy.fetch import fetch
from millpond_gateway.world.records import EngineFacts, PoolView, Replica
from millpond_gateway.world.view import World, make_endpoint

_log = structlog.get_logger("poll")
_MAX_CONCURRENT = 16
_ROUND_SECONDS = 0.2
_SILENT_ROUNDS = 2
"""Lost answers in a row that make a replica silent: one says nothing yet, on a busy machine or a connection just closed."""
_EAGER_ROUNDS = 150
"""A replica that starts is asked in every round for half a minute, so that it is used as soon as it can be."""
_NOT_FOUND = frozenset({404, 405})
_PLAIN_POOL = PoolView(name="", model="")


class StatePoller:
    """Asks each replica once per interval, spread at random, few at a time."""

    def __init__(self, world: World, connections: Connections, *, interval_seconds: float) -> None:
        self._world = world
        self._connections = connections
        self._interval = interval_seconds
        self._timeout = max(1.0, 2 * interval_seconds)
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)
        self._asking: set[str] = set()
        self._due: dict[str, float] = {}
        self._silent: dict[str, int] = {}
        """Rounds without an answer, by replica."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Poll until cancelled: each replica once per interval, one that has not answered yet more often at first."""
        loop = asyncio.get_running_loop()
        while True:
            now = loop.time()
            replicas = self._world.replicas
            for replica in replicas:
                if now >= self._due.get(replica.uid, now) and replica.uid not in self._asking:
                    self._start(replica, now)
            if len(self._due) > 2 * len(replicas) + 16:
                known = {replica.uid for replica in replicas}
                self._due = {uid: due for uid, due in self._due.items() if uid in known}
                self._silent = {uid: count for uid, count in self._silent.items() if uid in known}
            await asyncio.sleep(min(_ROUND_SECONDS, self._interval))

    def has_heard_all(self) -> bool:
        """Whether every known replica answered, or was silent often enough to be taken for one that does not."""
        counts = [self._silent.get(replica.uid) for replica in self._world.replicas]
        return all(count is not None and (count == 0 or count >= _SILENT_ROUNDS) for count in counts)

    def _start(self, replica: Replica, now: float) -> None:
        self._asking.add(replica.uid)
        answers = self._world.find_facts(replica.uid).answers
        eager = not answers and self._silent.get(replica.uid, 0) < _EAGER_ROUNDS
        spread = random.uniform(0.75, 1.25)  # noqa: S311 - spreads load, keeps no secret
        self._due[replica.uid] = now + spread * (
            min(_ROUND_SECONDS, self._interval) if eager else self._interval
        )
        task = asyncio.get_running_loop().create_task(self._ask(replica))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, replica: Replica) -> None:
        try:
            async with self._slots:
                facts = await self._fetch_facts(replica)
        finally:
            self._asking.discard(replica.uid)
        silent = self._silent[replica.uid] = 0 if facts.answers else self._silent.get(replica.uid, 0) + 1
        before = self._world.find_facts(replica.uid)
        if before.answers and 0 < silent < _SILENT_ROUNDS:
            return
        if before.answers != facts.answers:
            _log.info("engine", pod=replica.pod, pool=replica.pool, answers=facts.answers, epoch=facts.epoch)
        self._world.put_facts(replica.uid, facts)

    async def _fetch_facts(self, replica: Replica) -> EngineFacts:
        before = self._world.find_facts(replica.uid)
        endpoint = make_endpoint(_PLAIN_POOL, replica, before)
        try:
            answer = await fetch(self._connections, endpoint, "/v1/state", timeout_seconds=self._timeout)
            if answer.head.status in _NOT_FOUND:
                return await self._fetch_health(replica)
            return make_facts(parse_engine_state(answer.body))
        except (OSError, msgspec.MsgspecError):
            # What it told before holds until it tells otherwise; whether it answers is news.
            return msgspec.structs.replace(before, answers=False)

    async def _fetch_health(self, replica: Replica) -> EngineFacts:
        """An engine that is not ours tells no state: it is ready when its health check says so."""
        endpoint = make_endpoint(_PLAIN_POOL, replica, EngineFacts())
        health = await fetch(self._connections, endpoint, "/health", timeout_seconds=self._timeout)
        if health.head.status != 200:
            return EngineFacts(answers=True, ready=False)
        told = ForeignFacts()
        try:
            page = await fetch(self._connections, endpoint, "/metrics", timeout_seconds=self._timeout)
            models = await fetch(self._connections, endpoint, "/v1/models", timeout_seconds=self._timeout)
            told = read_foreign(page.body.decode("utf-8", "replace"), models.body)
        except OSError:
            pass  # it serves all the same; what it tells of itself only helps
        return EngineFacts(
            answers=True,
            ready=True,
            epoch=told.epoch,
            block_tokens=told.block_tokens,
            num_blocks=told.num_blocks,
            max_model_tokens=told.max_model_tokens,
        )


def make_facts(state: EngineState) -> EngineFacts:
    """The part of an engine's state that routing uses."""
    return EngineFacts(
        answers=True,
        ready=state.phase in {"Ready", "Draining"},
        draining=state.phase == "Draining",
        epoch=state.epoch,
        block_tokens=state.block_tokens,
        num_blocks=state.device.total,
        max_model_tokens=state.max_model_tokens,
        prefill_tokens_per_second=round_speed(state.speeds.prefill_tokens_per_second),
    )


def round_speed(speed: float | None) -> float | None:
    """Two significant digits: a prior needs no more, and every change of a fact renews the whole view."""
    return float(f"{speed:.1e}") if speed is not None else None
