"""Progress on standard error: every step with the seconds it took."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


def say(line: str) -> None:
    """Print a line for the person who waits."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def step(what: str) -> Iterator[None]:
    """Print what was done once it is done, with its time."""
    started = time.monotonic()
    yield
    say(f"[{time.monotonic() - started:5.1f} s] {what}")
