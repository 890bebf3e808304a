"""Asks every engine for its state, lightly: epoch, block counts, speed, and for static endpoints readiness."""

from __future__ import annotations

import asyncio
import random

import msgspec
import structlog

from millpond_common.contract.engine_state import EngineState, parse_engine_state
from millpond_gateway.proxy.connections import Connections
from millpond_gateway.proxy.fetch import fetch
from millpond_gateway.world.records import EngineFacts, PoolView, Replica
from millpond_gateway.world.view import World, make_endpoint

_log = structlog.get_logger("poll")
_MAX_CONCURRENT = 16
_NOT_FOUND = frozenset({404, 405})
_PLAIN_POOL = PoolView(name="", model="")


class StatePoller:
    """One round per interval over all replicas, spread over it at random, few at a time."""

    def __init__(self, world: World, connections: Connections, *, interval_seconds: float) -> None:
        self._world = world
        self._connections = connections
        self._interval = interval_seconds
        self._timeout = max(1.0, 2 * interval_seconds)
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)
        self._asking: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Poll until cancelled; a replica that has not answered yet is asked in every short round."""
        while True:
            fresh = False
            for replica in self._world.replicas:
                known = self._world.find_facts(replica.uid).answers
                fresh = fresh or not known
                if replica.uid not in self._asking:
                    self._start(replica, jitter=self._interval / 2 if known else 0.0)
            await asyncio.sleep(min(0.2, self._interval) if fresh else self._interval)

    def _start(self, replica: Replica, *, jitter: float) -> None:
        self._asking.add(replica.uid)
        task = asyncio.get_running_loop().create_task(self._ask(replica, jitter))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, replica: Replica, jitter: float) -> None:
        try:
            if jitter:
                await asyncio.sleep(random.uniform(0.0, jitter))  # noqa: S311 - spreads load, keeps no secret
            async with self._slots:
                facts = await self._fetch_facts(replica)
        finally:
            self._asking.discard(replica.uid)
        before = self._world.find_facts(replica.uid)
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
        return EngineFacts(answers=True, ready=health.head.status == 200)


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
        prefill_tokens_per_second=state.speeds.prefill_tokens_per_second,
    )
