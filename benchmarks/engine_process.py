"""`millpond-engine serve` on the small real model as a process of its own, for the benchmarks that talk to it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent
MODEL_NAME = "smollm2"
PORTS = ["--port", "0", "--admin-port", "0", "--kv-events-port", "0", "--kv-replay-port", "0"]


class EngineProcess:
    """A started engine and the log lines read so far."""

    def __init__(self, model: Path, *flags: str, threads: int | None = None) -> None:
        environment = os.environ | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
        if threads is None:
            environment.pop("OMP_NUM_THREADS", None)
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "millpond_engine", "serve", "--host", "127.0.0.1", *PORTS),
                *("--model-name", MODEL_NAME, "--model-path", str(model), *flags),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.lines: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def wait_for(self, event: str) -> dict[str, Any]:
        """The log line with this event, which the engine writes sooner or later."""
        for line in self.lines:
            if line["event"] == event:
                return line
        assert self._process.stdout is not None
        for text in self._process.stdout:
            self.lines.append(json.loads(text))
            if self.lines[-1]["event"] == event:
                return self.lines[-1]
        raise RuntimeError(f"the engine ended before {event!r}; its last lines: {self.lines[-3:]}")

    def read_peak_bytes(self) -> int:
        """Most memory this process had resident at once."""
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii")
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) * 1024

    @property
    def url(self) -> str:
        """Address of the tenants' port."""
        return f"http://127.0.0.1:{self.wait_for('listening')['port']}"


@contextmanager
def run_engine(model: Path, *flags: str) -> Iterator[EngineProcess]:
    """A ready engine."""
    with EngineProcess(model, *flags) as engine:
        engine.wait_for("engine ready")
        yield engine


def fetch_model() -> Path:
    """The small real model, downloaded once per machine."""
    command = [sys.executable, str(ROOT / "hack" / "fetch-model")]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
