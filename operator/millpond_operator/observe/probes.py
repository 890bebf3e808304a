"""Real requests to replicas, sent in the background; the snapshot holds the answers that are in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from millpond_common.contract.gateway_report import ProbeRequest, ProbeResult
from millpond_operator.clients.gateway import GatewayCaller
from millpond_operator.errors import GatewayCallError
from millpond_operator.plan.snapshot import Pod, ProbeAnswer

Clock = Callable[[], float]
Start = tuple[int, float | None]
"""Restarts and time of getting ready: with either, what was proven before no longer is."""


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    """A replica to ask, and through whom."""

    pool: tuple[str, str]
    """Namespace and name."""
    pod: Pod
    gateway_address: str | None
    """None for a pool that wants no gateway: the replica is asked directly."""
    model: str = ""


class Prober:
    """Remembers one answer per start of a replica; a failed one is asked again after a while."""

    def __init__(
        self,
        caller: GatewayCaller,
        clock: Clock,
        *,
        on_answer: Callable[[tuple[str, str]], None],
        timeout_seconds: float = 30.0,
        retry_seconds: float = 5.0,
        max_parallel: int = 16,
    ) -> None:
        self._caller = caller
        self._clock = clock
        self._on_answer = on_answer
        self._timeout_seconds = timeout_seconds
        self._retry_seconds = retry_seconds
        self._slots = asyncio.Semaphore(max_parallel)
        self._answers: dict[str, tuple[Start, ProbeAnswer]] = {}
        self._running: dict[str, asyncio.Task[None]] = {}

    def get_answer(self, pod: Pod) -> ProbeAnswer | None:
        """The answer of this start of the replica."""
        start, answer = self._answers.get(pod.uid, (None, None))
        return answer if start == (pod.restarts, pod.ready_since) else None

    def ask(self, target: ProbeTarget) -> None:
        """Send a request unless one is on its way or the last answer still counts."""
        pod = target.pod
        answer = self.get_answer(pod)
        fresh = answer is not None and (answer.ok or self._clock() - answer.at < self._retry_seconds)
        if pod.uid in self._running or fresh:
            return
        task = asyncio.create_task(self._run(target), name=f"probe {pod.name}")
        self._running[pod.uid] = task
        task.add_done_callback(lambda _: self._running.pop(pod.uid, None))

    def forget_others(self, living: set[str]) -> None:
        """Drop answers of replicas that are gone."""
        self._answers = {uid: kept for uid, kept in self._answers.items() if uid in living}

    async def close(self) -> None:
        """Cancel what is on its way."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, target: ProbeTarget) -> None:
        pod = target.pod
        request = ProbeRequest(pool=target.pool[1], pod_uid=pod.uid, timeout_seconds=self._timeout_seconds)
        async with self._slots:
            try:
                if target.gateway_address is None:
                    result = await self._caller.probe_engine(
                        pod.address, target.model, timeout_seconds=self._timeout_seconds
                    )
                else:
                    result = await self._caller.probe(target.gateway_address, request)
            except GatewayCallError as error:
                result = ProbeResult(ok=False, status=None, message=str(error), seconds=0.0)
        answer = ProbeAnswer(pod.uid, result.ok, result.message, self._clock())
        self._answers[pod.uid] = ((pod.restarts, pod.ready_since), answer)
        self._on_answer(target.pool)
