"""Rank 0's side of the other ranks: start their processes, tell them every step, notice at once when one ends.

A rank is a process because torch's collectives need one per rank. Each hangs on one pipe: orders go down, one report
comes up after loading, and its end is how either side learns that the other is gone, whatever the cause.

Errors:
    RankLostError: a rank ended, hangs or failed a step. What the ranks hold no longer agrees: the engine ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

import msgspec
import structlog

from millpond_common.contract.engine_config import EngineConfig
from millpond_engine.records.grammar import TokenMasks
from millpond_engine.records.step import StepPlan

_log = structlog.get_logger(__name__)

LOAD_SECONDS = 3600.0
"""Longest wait for a rank to load after rank 0 has: they read from one disk."""
SEND_SECONDS = 60.0
_GRACE_SECONDS = 15.0
"""After a rank is lost: time for the engine to end in order. A device may be waiting for the lost rank for ever."""
_END_SECONDS = 5.0
_POLL_SECONDS = 0.2


class RankLostError(RuntimeError):
    """One of the processes that share the model is gone or failed; the message says which and why."""


@dataclass(frozen=True, slots=True)
class RankSpec:
    """All that a rank is started with."""

    config: EngineConfig
    rank: int
    size: int
    folder: str
    """Where the ranks meet."""


@dataclass(frozen=True, slots=True)
class Order:
    """What rank 0 tells the others to do, in the order it does it itself."""

    plan: StepPlan | None = None
    masks: TokenMasks | None = None
    """For the choice of the step that was ordered last."""
    poison: tuple[int, ...] = ()
    """For tests: fill these blocks with NaN."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank says after loading, or before it ends."""

    loaded: bool
    message: str = ""


class RankProcesses:
    """Ranks 1 .. size - 1. Owned by one thread; a watcher of its own waits for their ends."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        num_threads: int,
        grace_seconds: float = _GRACE_SECONDS,
        give_up: Callable[[int], object] = os._exit,
    ) -> None:
        self.size = config.tensor_parallel_size
        self.folder = Path(tempfile.mkdtemp(prefix="millpond-ranks-"))
        self._grace_seconds = grace_seconds
        self._give_up = give_up
        self._lost = ""
        self._noticed = threading.Event()
        self._closing = False
        self._loaded: set[int] = set()
        self._pipes: dict[int, Connection] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for rank in range(1, self.size):
                self._start(RankSpec(config, rank, self.size, str(self.folder)), num_threads)
        except BaseException:
            self.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank from 1."""
        return [process.pid for process in self._processes.values()]

    def wait_loaded(self, tell: Callable[[], None]) -> None:
        """Wait until all have read their weights, then let them join; `tell` is called meanwhile and may raise.

        Raises:
            RankLostError: one failed or took too long.
        """
        deadline = time.monotonic() + LOAD_SECONDS
        while len(self._loaded) < self.size - 1:
            self.check()
            tell()
            if time.monotonic() > deadline:
                raise RankLostError(f"ranks took longer than {LOAD_SECONDS:.0f} s to load")
            time.sleep(_POLL_SECONDS / 10)
        self.order(Order())

    def order(self, order: Order) -> None:
        """Tell all ranks, in bounded time.

        Raises:
            RankLostError: one does not read any more.
        """
        message = msgspec.msgpack.encode(order)
        for rank, pipe in self._pipes.items():
            try:
                pipe.send_bytes(message)
            except OSError as error:
                raise self.explain(f"rank {rank} takes no orders: {error}") from error

    def check(self) -> None:
        """Raise when a rank is gone.

        Raises:
            RankLostError: with the rank and how it ended.
        """
        if self._lost:
            self._noticed.set()
            raise RankLostError(self._lost)

    def explain(self, otherwise: str) -> RankLostError:
        """The error for a step that failed: a rank's end if one ended just now, else what the caller saw."""
        deadline = time.monotonic() + 1.0  # the failed collective may be known before the process is reaped
        while not self._lost and time.monotonic() < deadline:
            time.sleep(0.01)
        self._noticed.set()
        return RankLostError(f"{self._lost} ({otherwise})" if self._lost else otherwise)

    def close(self) -> None:
        """End all ranks and wait for them, in bounded time. Idempotent."""
        self._closing = True
        self._noticed.set()
        for pipe in self._pipes.values():
            with contextlib.suppress(OSError):
                socket.fromfd(pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM).shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + _END_SECONDS
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, spec: RankSpec, num_threads: int) -> None:
        ours, theirs = socket.socketpair()
        seconds = struct.pack("ll", int(SEND_SECONDS), 0)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        with theirs:
            environ = os.environ | {"OMP_NUM_THREADS": str(num_threads)}
            self._processes[spec.rank] = subprocess.Popen(  # noqa: S603 - this program itself
                [sys.executable, "-m", "millpond_engine.runner.rank_worker", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env=environ,
                start_new_session=True,  # a Ctrl-C is for rank 0, which drains first
            )
        self._pipes[spec.rank] = Connection(ours.detach())
        self._pipes[spec.rank].send_bytes(msgspec.msgpack.encode(spec))

    def _watch(self) -> None:
        """Take the ranks' reports until one is lost or all are asked to end."""
        ranks = {pipe: rank for rank, pipe in self._pipes.items()}
        while not self._closing and not self._lost:
            for pipe in wait(list(ranks), _POLL_SECONDS):
                assert isinstance(pipe, Connection)
                self._hear(ranks[pipe], pipe)
        if self._lost and not self._closing:
            _log.error("rank lost", failure=self._lost)
            if not self._noticed.wait(self._grace_seconds):
                _log.error("the engine does not end by itself", seconds=self._grace_seconds)
                self._give_up(1)

    def _hear(self, rank: int, pipe: Connection) -> None:
        try:
            report = msgspec.msgpack.decode(pipe.recv_bytes(), type=Report)
        except (EOFError, OSError):
            self._lost = self._lost or f"rank {rank} {self._describe_end(rank)}"
            return
        if report.loaded:
            self._loaded.add(rank)
        else:
            self._lost = f"rank {rank} failed: {report.message}"

    def _describe_end(self, rank: int) -> str:
        try:
            code = self._processes[rank].wait(1.0)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        return f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
