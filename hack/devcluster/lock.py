"""One command at a time: an advisory lock that the kernel drops when its holder ends, however it ends."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from devcluster.errors import LockTimeoutError
from devcluster.steps import say

POLL_SECONDS = 0.2


@contextmanager
def hold_lock(path: Path, *, deadline_seconds: float) -> Iterator[None]:
    """Keep other commands out; says so when it has to wait.

    Raises:
        LockTimeoutError: somebody holds the lock past the deadline.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + deadline_seconds
    with path.open("a+") as lock:
        waiting = False
        while not _try_lock(lock.fileno()):
            if not waiting:
                say("another devcluster command is at work: waiting for it")
            waiting = True
            if time.monotonic() > deadline:
                raise LockTimeoutError(
                    f"another command has held {path} for {deadline_seconds:.0f} s:"
                    f" end it (`fuser {path}` names it), then try again"
                )
            time.sleep(POLL_SECONDS)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
