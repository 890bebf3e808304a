"""Steps with a name and a time, and commands whose failure tells the end of their output."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from demo.errors import DemoError

ROOT = Path(__file__).resolve().parents[2]
TOOLS = {"PYTHONPATH": str(ROOT / "hack")}
"""Environment in which hack/'s modules are found."""
STARTED = time.monotonic()


@contextmanager
def step(title: str) -> Iterator[None]:
    """Print a step, and when it ends, how long it took."""
    started = time.monotonic()
    print(f"\n==> {title}", flush=True)
    try:
        yield
    except DemoError as error:
        print(f"\nFAILED at step: {title}\n  why: {error}", file=sys.stderr)
        if error.hint:
            print(f"  try: {error.hint}", file=sys.stderr)
        raise SystemExit(1) from None
    print(f"    {time.monotonic() - started:.1f} s (total {time.monotonic() - STARTED:.0f} s)", flush=True)


def say(text: str) -> None:
    """Print one line of progress inside a step."""
    print(f"    {text}", flush=True)


def run(
    command: Sequence[str],
    *,
    what: str,
    env: Mapping[str, str] | None = None,
    seconds: float = 1800,
    hint: str = "",
    show: bool = False,
    given: str | None = None,
) -> str:
    """Run to the end; return its output, or show it as it comes.

    Raises:
        DemoError: the program is missing, fails, or takes longer than `seconds`.
    """
    environment = {**os.environ, **TOOLS, **(env or {})}
    try:
        done = subprocess.run(
            list(command),
            cwd=ROOT,
            env=environment,
            input=given,
            text=True,
            timeout=seconds,
            check=False,
            stdout=None if show else subprocess.PIPE,
            stderr=None if show else subprocess.STDOUT,
        )
    except FileNotFoundError as error:
        raise DemoError(f"{what}: {command[0]} is not installed", hint=hint) from error
    except subprocess.TimeoutExpired as error:
        raise DemoError(f"{what} did not end within {seconds:.0f} s", hint=hint) from error
    if done.returncode != 0:
        tail = "\n       ".join((done.stdout or "").strip().splitlines()[-15:])
        raise DemoError(f"{what} failed (exit {done.returncode}) {tail}", hint=hint)
    return done.stdout or ""
