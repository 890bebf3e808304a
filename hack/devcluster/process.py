"""Start, recognize and end the cluster's programs.

Each program carries the cluster's state folder in its environment, so that even a driver killed between
starting a program and writing it down leaves nothing that the next command cannot find.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from devcluster.errors import StartError
from devcluster.paths import Layout

MARK = "MILLPOND_DEVCLUSTER"
# Daemons get these of the caller's variables and no others: a proxy setting or GODEBUG of the caller's shell would
# otherwise change how the cluster behaves.
INHERITED = ("PATH", "HOME", "LANG", "TZ", "TMPDIR")
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Process:
    """One running program; the start time tells it from a later process with the same number."""

    role: str
    pid: int
    start_ticks: int


def spawn(
    layout: Layout, role: str, argv: Sequence[str], *, extra_env: Mapping[str, str] | None = None
) -> Process:
    """Start `argv` detached, its output in the role's log."""
    environ = {name: os.environ[name] for name in INHERITED if name in os.environ}
    environ |= {**(extra_env or {}), MARK: str(layout.state)}
    with log_path(layout, role).open("ab") as log:
        child = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environ,
            start_new_session=True,
            cwd="/",
        )
    # Popen would warn that the child outlives it, which is what a daemon is for.
    child.returncode = 0
    return Process(role, child.pid, fetch_start_ticks(child.pid) or 0)


def log_path(layout: Layout, role: str) -> Path:
    """Where a role writes what it has to say."""
    return layout.logs / f"{role}.log"


def fetch_start_ticks(pid: int) -> int | None:
    """Read when a process started, in clock ticks since boot; None when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def is_alive(process: Process) -> bool:
    """Whether that very process still runs."""
    return fetch_start_ticks(process.pid) == process.start_ticks


def find_marked(layout: Layout) -> tuple[int, ...]:
    """Find every process that carries this cluster's mark, recorded or not."""
    wanted = f"{MARK}={layout.state}".encode()
    return tuple(pid for pid in _all_pids() if wanted in _read_environ(pid).split(b"\0"))


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _read_environ(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it ended meanwhile, or belongs to another user and so cannot be ours
        return b""


def stop(pids: Iterable[int], *, grace_seconds: float) -> tuple[int, ...]:
    """End the processes, the polite way first; return those that even SIGKILL did not end within ten seconds."""
    handles = dict(_open_handles(pids))
    try:
        _signal_all(handles, signal.SIGTERM)
        if not _wait_all(handles, grace_seconds):
            _signal_all(handles, signal.SIGKILL)
            _wait_all(handles, 10.0)
        return tuple(pid for pid in handles if fetch_start_ticks(pid) is not None)
    finally:
        for handle in handles.values():
            os.close(handle)


def _open_handles(pids: Iterable[int]) -> Iterable[tuple[int, int]]:
    # A handle names one process for good, so a number that is given out again is never signalled.
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            yield pid, os.pidfd_open(pid)


def _signal_all(handles: Mapping[int, int], number: signal.Signals) -> None:
    for handle in handles.values():
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, number)


def _wait_all(pids: Iterable[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(_reap(pid) is not None for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _reap(pid: int) -> int | None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    return fetch_start_ticks(pid)


def wait_until(
    what: str,
    ready: Callable[[], bool],
    *,
    layout: Layout,
    watched: Sequence[Process],
    deadline_seconds: float,
) -> None:
    """Poll until `ready` holds.

    Raises:
        StartError: a watched process ended, or the deadline passed; names the log and its last line.
    """
    deadline = time.monotonic() + deadline_seconds
    while not ready():
        for process in watched:
            if not is_alive(process):
                raise StartError(
                    f"{process.role} ended while waiting for {what}: {describe_log(layout, process.role)}"
                )
        if time.monotonic() > deadline:
            roles = ", ".join(process.role for process in watched)
            raise StartError(
                f"{what} not there after {deadline_seconds:.0f} s: {describe_log(layout, watched[-1].role)}"
                f" (running: {roles}); a slow or full machine may need another try"
            )
        time.sleep(POLL_SECONDS)


def describe_log(layout: Layout, role: str) -> str:
    """Say the last line of a role's log that is no usage text, and where the whole log is."""
    path = log_path(layout, role)
    try:
        lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    last = next((line for line in reversed(lines) if not line.startswith("-")), "no output")
    return f"{last[:300]} (log: {path})"


def run_tool(argv: Sequence[str], *, deadline_seconds: float = 60.0, stdin: bytes | None = None) -> str:
    """Run a short command to its end and return what it printed.

    Raises:
        StartError: it failed or took too long; the message holds its last line of error output.
    """
    try:
        done = subprocess.run(
            list(argv), input=stdin, stdin=None if stdin is not None else subprocess.DEVNULL,
            capture_output=True, timeout=deadline_seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise StartError(
            f"{Path(argv[0]).name} took longer than {deadline_seconds:.0f} s: {' '.join(argv)}"
        ) from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["no output"]
        raise StartError(f"{' '.join(argv[:6])} failed with status {done.returncode}: {said[-1]}")
    return done.stdout.decode(errors="replace")
