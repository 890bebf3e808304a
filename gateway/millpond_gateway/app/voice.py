"""The admin port of a gateway with several workers: one answer for all of them.

Runs in the admin server's thread. Each worker is asked over its own Unix socket; one that does not answer is left
out, and what it had counted when it was last heard stays counted.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec
import structlog
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from millpond_common.contract.gateway_report import GatewayReport, ProbeRequest, ProbeResult
from millpond_gateway.app.admin import STATE_PATH, AdminActions, AdminAnswer, AdminServer
from millpond_gateway.app.merge import (
    Totals,
    WorkerState,
    add_totals,
    find_totals,
    merge_metrics,
    merge_reports,
    parse_metrics,
)
from millpond_gateway.app.metrics import PREFIX
from millpond_gateway.app.plan import WorkerPlan

_log = structlog.get_logger("supervisor")
_ASK_SECONDS = 2.0
_COUNT_SECONDS = 2.0
"""How often each worker's counts are read, so that little is lost with one that dies."""
_MAX_ANSWER_BYTES = 64 * 1024 * 1024
_TEXT = b"text/plain; version=0.0.4; charset=utf-8"


class WorkerPlace(Protocol):
    """What is asked of a worker's place here."""

    plan: WorkerPlan

    @property
    def alive(self) -> bool: ...


class _Page(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


class Voice:
    """Answers for all workers."""

    def __init__(self, workers: Sequence[WorkerPlace]) -> None:
        self._workers = workers
        self._epoch = secrets.token_hex(8)
        self._server: AdminServer | None = None
        self._served = False
        self._ended: Totals = {}
        self._last: dict[int, Totals] = {}
        self._endings: Counter[str] = Counter()
        self._task: asyncio.Future[None] | None = None
        self.draining = False
        self.port = 0

    def start(self, sock: socket.socket) -> None:
        """Serve the admin port."""
        actions = AdminActions(
            health=self.health, ready=self.ready, metrics=self.metrics, report=self.report, probe=self.probe
        )
        self.port = sock.getsockname()[1]
        self._server = AdminServer(sock, actions)
        self._server.start()
        self._task = asyncio.ensure_future(self._count())

    def stop(self) -> None:
        """Stop serving."""
        if self._task is not None:
            self._task.cancel()
        if self._server is not None:
            self._server.stop()

    def note_ending(self, worker: WorkerPlace, reason: str) -> None:
        """A worker ended: keep what it had counted."""
        self._endings[reason] += 1
        self._ended = add_totals(self._ended, self._last.pop(worker.plan.number, {}))

    async def is_healthy(self, worker: WorkerPlace) -> bool:
        """Whether a worker's loop runs."""
        found = await self._ask(worker, b"/health")
        return found is not None and found[0] == 200

    # Answers.

    async def health(self) -> AdminAnswer:
        """Some worker runs; one that hangs is killed and started again, the others serve on."""
        found = await self._ask_all(b"/health")
        num_ok = sum(status == 200 for _, status, _ in found)
        body = {"status": "ok" if num_ok else "stuck", "workers": len(self._workers), "healthy": num_ok}
        starting = not self._served and not found
        return AdminAnswer(200 if num_ok or starting else 503, msgspec.json.encode(body))

    async def ready(self) -> AdminAnswer:
        """All workers once, then some worker: a connection goes only to those that listen."""
        if self.draining:
            return AdminAnswer(503, b'{"status":"draining"}')
        found = [(status, body) for _, status, body in await self._ask_all(b"/ready")]
        num_ready = sum(status == 200 for status, _ in found)
        needed = 1 if self._served else len(self._workers)
        if num_ready < needed:
            return next(
                (AdminAnswer(status, body) for status, body in found if status != 200),
                AdminAnswer(503, b'{"status":"waiting for the workers"}'),
            )
        self._served = True
        stale = any(b"stale" in body for status, body in found if status == 200)
        return AdminAnswer(200, b'{"status":"ready","view":"stale"}' if stale else b'{"status":"ready"}')

    async def report(self) -> AdminAnswer:
        """The report of all workers that answer."""
        states: list[WorkerState] = []
        for number, status, body in await self._ask_all(STATE_PATH):
            try:
                states += [msgspec.json.decode(body, type=WorkerState)] if status == 200 else []
            except msgspec.MsgspecError as error:
                _log.warning("a worker's state is unreadable", worker=number, error=str(error))
        name = os.environ.get("POD_NAME") or socket.gethostname()
        if not states:
            nothing = GatewayReport(name, self._epoch, time.time(), 0.0, False, ())
            return AdminAnswer(200, msgspec.json.encode(nothing))
        merged = merge_reports(states, gateway=name, epoch=self._epoch)
        if len(states) < len(self._workers):
            merged = msgspec.structs.replace(merged, synced=False)
        return AdminAnswer(200, msgspec.json.encode(merged))

    async def metrics(self) -> AdminAnswer:
        """Everything all workers counted, those that ended included."""
        pages = await self._read_metrics()
        families = merge_metrics(pages, self._ended)
        alive = GaugeMetricFamily(PREFIX + "workers", "Worker processes that answer.", value=len(pages))
        endings = CounterMetricFamily(
            PREFIX + "worker_endings", "Workers that ended unasked, by reason.", labels=("reason",)
        )
        for reason, count in self._endings.items():
            endings.add_metric((reason,), count)
        return AdminAnswer(200, generate_latest(_Page([*families, alive, endings])), _TEXT)

    async def probe(self, request: ProbeRequest) -> ProbeResult:
        """Through the first worker that can send it."""
        body = msgspec.json.encode(request)
        for worker in self._workers:
            seconds = request.timeout_seconds + _ASK_SECONDS
            found = await self._ask(worker, b"/v1/probe", body=body, seconds=seconds)
            if found is not None and found[0] == 200:
                return msgspec.json.decode(found[1], type=ProbeResult)
        return ProbeResult(False, None, "no worker answers", 0.0)

    # Asking.

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(_COUNT_SECONDS)
            await self._read_metrics()

    async def _read_metrics(self) -> list[list[Metric]]:
        pages: list[list[Metric]] = []
        for number, status, body in await self._ask_all(b"/metrics"):
            if status == 200:
                families = parse_metrics(body.decode())
                self._last[number] = find_totals(families)
                pages.append(families)
        return pages

    async def _ask_all(self, path: bytes) -> list[tuple[int, int, bytes]]:
        """Number, status and body of every worker that answers."""
        found = await asyncio.gather(*(self._ask(worker, path) for worker in self._workers))
        return [
            (worker.plan.number, *answer)
            for worker, answer in zip(self._workers, found, strict=True)
            if answer is not None
        ]

    async def _ask(
        self, worker: WorkerPlace, path: bytes, *, body: bytes = b"", seconds: float = _ASK_SECONDS
    ) -> tuple[int, bytes] | None:
        if not worker.alive:
            return None
        try:
            async with asyncio.timeout(seconds):
                return await _fetch(worker.plan.admin_path, path, body)
        except (OSError, ValueError, asyncio.IncompleteReadError):
            return None


async def _fetch(socket_path: str, path: bytes, body: bytes) -> tuple[int, bytes]:
    """One request to a worker's admin server, and its answer to the end of the connection."""
    method = b"POST" if body else b"GET"
    head = b"%b %b HTTP/1.1\r\nhost: worker\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    reader, writer = await asyncio.open_unix_connection(socket_path, limit=_MAX_ANSWER_BYTES)
    try:
        writer.write(head % (method, path, len(body)) + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        return int(answer.split(b" ", 2)[1]), await reader.read()
    finally:
        writer.close()
