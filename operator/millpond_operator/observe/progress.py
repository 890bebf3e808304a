"""How far the fetch step of a replica is, and what it told of the model's size: its log, read now and then while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from millpond_common.contract import labels
from millpond_common.contract.model_facts import LINE_PREFIX, ModelFacts, parse_facts
from millpond_operator.clients.kube import KubeClient
from millpond_operator.errors import ForbiddenError, KubeError
from millpond_operator.plan.snapshot import Pod

Clock = Callable[[], float]
KEEP_SECONDS = 15.0
KEEP_SILENT_SECONDS = 3.0
"""Until the first line, which may be that nothing can be reached."""
KEEP_FORBIDDEN_SECONDS = 600.0
MAX_PODS = 4
"""Replicas of one pool whose logs are read at a time; they fetch the same files."""
PREFIX = "fetch: "
TAIL_LINES = 30
"""Of the log; the size is told once, and up to one line of progress follows every five seconds."""


class FetchProgress:
    """Latest progress line per pod."""

    def __init__(self, kube: KubeClient, clock: Clock) -> None:
        self._kube = kube
        self._clock = clock
        self._known: dict[str, tuple[float, str]] = {}
        self._facts: dict[str, ModelFacts] = {}
        self._forbidden_until = float("-inf")

    async def fetch_lines(self, namespace: str, pods: Iterable[Pod]) -> dict[str, str]:
        """Progress by pod uid of the replicas that are fetching; absent where nothing is known."""
        fetching = [(pod, name) for pod in pods if (name := find_fetching(pod)) is not None][:MAX_PODS]
        if not fetching:
            return {}
        await asyncio.gather(*(self._refresh(namespace, pod, container) for pod, container in fetching))
        return {
            pod.uid: self._known[pod.uid][1] for pod, _ in fetching if self._known.get(pod.uid, (0, ""))[1]
        }

    def get_facts(self, pods: Iterable[Pod]) -> dict[str, ModelFacts]:
        """The model's size by pod uid, as far as the logs read until now told it."""
        return {pod.uid: self._facts[pod.uid] for pod in pods if pod.uid in self._facts}

    async def _refresh(self, namespace: str, pod: Pod, container: str) -> None:
        now = self._clock()
        at, line = self._known.get(pod.uid, (float("-inf"), ""))
        if now - at < (KEEP_SECONDS if line else KEEP_SILENT_SECONDS) or now < self._forbidden_until:
            return
        try:
            log = await self._kube.fetch_log(namespace, pod.name, container, tail_lines=TAIL_LINES)
            line = find_progress(log) or line
            if container == labels.FETCH_CONTAINER and (facts := find_facts(log)) is not None:
                self._facts[pod.uid] = facts
        except ForbiddenError:
            self._forbidden_until = now + KEEP_FORBIDDEN_SECONDS
        except KubeError:
            pass  # the kubelet may not have the container yet; progress is worth no retry of the whole pool
        self._known = {uid: kept for uid, kept in self._known.items() if now - kept[0] < 10 * KEEP_SECONDS}
        self._known[pod.uid] = (now, line)
        self._facts = {uid: facts for uid, facts in self._facts.items() if uid in self._known}


def find_fetching(pod: Pod) -> str | None:
    """Name of the fetch container that runs now."""
    running = (c.name for c in pod.containers if c.is_init and c.running and c.name.startswith("fetch-"))
    return None if pod.deleting else next(running, None)


def find_progress(log: str) -> str:
    """The last progress line without its prefix."""
    lines = [line for line in _list_told(log) if not line.startswith(LINE_PREFIX)]
    return lines[-1][:400] if lines else ""


def find_facts(log: str) -> ModelFacts | None:
    """What the log tells of the model's size."""
    found = (
        parse_facts(line.removeprefix(LINE_PREFIX))
        for line in _list_told(log)
        if line.startswith(LINE_PREFIX)
    )
    return next((facts for facts in found if facts is not None), None)


def _list_told(log: str) -> list[str]:
    return [line.removeprefix(PREFIX).strip() for line in log.splitlines() if line.startswith(PREFIX)]
