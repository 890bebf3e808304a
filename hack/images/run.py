"""Run one build command with progress on a terminal and its tail in the error."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from images.errors import BuildError, MissingToolError


def run(command: Sequence[str], *, what: str, log: Path | None = None) -> str:
    """Run to the end and return the output.

    Raises:
        MissingToolError: when the program does not exist.
        BuildError: when it fails, with the last lines it printed.
    """
    tail: deque[str] = deque(maxlen=25)
    output: list[str] = []
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except FileNotFoundError as error:
        raise MissingToolError(f"{command[0]} is not installed: run apt-get install {command[0]}") from error
    assert process.stdout is not None
    for line in process.stdout:
        tail.append(line.rstrip())
        output.append(line)
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("".join(output), encoding="utf-8")
    if process.wait() != 0:
        raise BuildError(f"{what} failed (exit {process.returncode}):\n  " + "\n  ".join(tail))
    return "".join(output)


class Step:
    """Context that prints a step and the seconds it took."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.started = 0.0

    def __enter__(self) -> Self:
        self.started = time.monotonic()
        print(f"{self.text} ...", end=" ", flush=True)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        seconds = time.monotonic() - self.started
        print(f"{'failed after' if kind else 'done in'} {seconds:.1f} s", flush=True)
        sys.stdout.flush()
