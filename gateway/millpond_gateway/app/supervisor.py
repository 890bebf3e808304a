"""Several worker processes on one port, and the one process that starts, watches, stops and speaks for them.

Every worker is a whole gateway: it decides for itself and shares its decisions with the others as with any peer.
This process moves no request. It binds the ports so that they stay the gateway's, starts a worker again when one
ends, gives up when they keep ending, and answers the admin port with what all workers together know.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import structlog

from millpond_gateway.app.options import Options
from millpond_gateway.app.plan import WorkerPlan, write_plan
from millpond_gateway.app.sockets import find_local_host, listen
from millpond_gateway.app.voice import Voice

_log = structlog.get_logger("supervisor")
_MAX_RESTARTS = 5
_RESTART_WINDOW_SECONDS = 60.0
_FIRST_PAUSE_SECONDS = 0.2
_WATCH_SECONDS = 1.0
_STUCK_SECONDS = 60.0
_KILL_AFTER_SECONDS = 15.0
"""Beyond the grace: a worker that has not left by then does not leave by itself."""
WRONG_COMMAND_LINE = 2


class Worker:
    """One worker's place: the process that fills it changes."""

    def __init__(self, plan: WorkerPlan) -> None:
        self.plan = plan
        self.process: asyncio.subprocess.Process | None = None
        self.healthy_at = time.monotonic()

    @property
    def alive(self) -> bool:
        """A process runs."""
        return self.process is not None and self.process.returncode is None

    def send(self, number: signal.Signals) -> None:
        """Signal the process, if there is one."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)


class Supervisor:
    """Runs `options.workers` workers with the command line `arguments`."""

    def __init__(self, options: Options, arguments: Sequence[str]) -> None:
        self._options = options
        self._arguments = list(arguments)
        self._stop = asyncio.Event()
        self._failed: int | None = None
        self._endings: deque[float] = deque()
        self._held: list[socket.socket] = []
        self.workers: list[Worker] = []
        self.port = 0
        self.voice: Voice | None = None

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT, or until workers keep ending; the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        with tempfile.TemporaryDirectory(prefix="millpond-gateway-") as directory:
            try:
                self._reserve(Path(directory))
                return await self._serve()
            finally:
                for sock in self._held:
                    sock.close()

    def _reserve(self, directory: Path) -> None:
        """Bind every port without listening: workers may be dead, the ports stay theirs."""
        options = self._options
        data = listen(options.host, options.port, reuse_port=True)
        self.port = data.getsockname()[1]
        peers = [
            listen(options.host, options.peer_port and options.peer_port + number, reuse_port=True)
            for number in range(options.workers)
        ]
        self._held = [data, *peers]
        peer_ports = tuple(sock.getsockname()[1] for sock in peers)
        pin_secret = secrets.token_hex(16)
        self.workers = [
            Worker(
                WorkerPlan(
                    number=number,
                    port=self.port,
                    host=find_local_host(options.host),
                    peer_ports=peer_ports,
                    admin_path=str(directory / f"{number}.sock"),
                    pin_secret=pin_secret,
                )
            )
            for number in range(options.workers)
        ]

    async def _serve(self) -> int:
        voice = self.voice = Voice(self.workers)
        admin = listen(self._options.host, self._options.admin_port)
        loop = asyncio.get_running_loop()
        keepers = [loop.create_task(self._keep(worker)) for worker in self.workers]
        watcher = loop.create_task(self._watch())
        voice.start(admin)
        _log.info("supervising", workers=len(self.workers), port=self.port, admin_port=voice.port)
        try:
            await self._stop.wait()
            voice.draining = True
            await self._end_all(keepers)
        finally:
            watcher.cancel()
            voice.stop()
        if self._failed is not None:
            return self._failed
        codes = [worker.process.returncode for worker in self.workers if worker.process is not None]
        return 1 if any(codes) else 0

    async def _keep(self, worker: Worker) -> None:
        """Fill a worker's place until the gateway stops."""
        while not self._stop.is_set():
            worker.process = await self._start(worker.plan)
            worker.healthy_at = time.monotonic()
            status = await worker.process.wait()
            if self._stop.is_set():
                return
            self._note_ending(worker, status)
            pause = _FIRST_PAUSE_SECONDS * 2 ** min(len(self._endings), 6)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stop.wait()

    async def _start(self, plan: WorkerPlan) -> asyncio.subprocess.Process:
        environment = dict(os.environ)
        write_plan(plan, environment)
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "millpond_gateway",
            *self._arguments,
            env=environment,
            stdin=asyncio.subprocess.PIPE,  # its end tells a worker that this process is gone
        )

    def _note_ending(self, worker: Worker, status: int) -> None:
        """Count an end nobody asked for; give up when there are too many."""
        now = time.monotonic()
        self._endings.append(now)
        while self._endings[0] < now - _RESTART_WINDOW_SECONDS:
            self._endings.popleft()
        reason = name_ending(status)
        _log.error("a worker ended", worker=worker.plan.number, reason=reason, recent=len(self._endings))
        if self.voice is not None:
            self.voice.note_ending(worker, reason)
        if status == WRONG_COMMAND_LINE:
            self._give_up(WRONG_COMMAND_LINE, "a worker cannot use the command line")
        elif len(self._endings) > _MAX_RESTARTS:
            self._give_up(1, f"{len(self._endings)} workers ended within {_RESTART_WINDOW_SECONDS:g} s")

    def _give_up(self, status: int, message: str) -> None:
        _log.error("giving up: the gateway stops", reason=message)
        self._failed = status
        self._stop.set()

    async def _watch(self) -> None:
        """Kill a worker whose loop hangs: the others need not end for it."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            for worker in [worker for worker in self.workers if worker.alive]:
                if self.voice is not None and await self.voice.is_healthy(worker):
                    worker.healthy_at = time.monotonic()
                elif time.monotonic() - worker.healthy_at > _STUCK_SECONDS:
                    _log.error("a worker hangs: killing it", worker=worker.plan.number)
                    worker.send(signal.SIGKILL)

    async def _end_all(self, keepers: Sequence[asyncio.Task[None]]) -> None:
        """Drain all workers at once; kill what outlives the grace."""
        options = self._options
        for worker in self.workers:
            worker.send(signal.SIGTERM)
        limit = options.grace_seconds + 5 * options.drain_delay_seconds + _KILL_AFTER_SECONDS
        _, late = await asyncio.wait(keepers, timeout=limit)
        for worker in self.workers if late else ():
            worker.send(signal.SIGKILL)
        await asyncio.gather(*keepers, return_exceptions=True)


def name_ending(status: int) -> str:
    """Why a process ended, from its status."""
    if status >= 0:
        return f"Exit{status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"Signal{-status}"
