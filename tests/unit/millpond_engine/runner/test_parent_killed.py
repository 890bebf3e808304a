"""ENG-072: an engine that is killed takes the processes it started with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def list_ranks(pid: int) -> list[int]:
    """Ids of the ranks that a process started: it may run short-lived programs too, such as a compiler."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, file.read_text().split()):
            try:
                command = Path(f"/proc/{child}/cmdline").read_text()
            except OSError:
                continue
            if "millpond_engine.runner.rank_worker" in command:
                found.append(child)
    return found


def list_living(pids: list[int]) -> list[int]:
    """Ids of those that still run; a zombie waits only for its new parent."""
    living = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            living.append(pid)
    return living


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.mark.parametrize("moment", ["loading", "serving"])
def test_eng_072_no_rank_outlives_a_killed_engine(
    moment: str, tiny_model: Callable[[str], Any], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    command = [
        sys.executable,
        "-m",
        "millpond_engine",
        "serve",
        "--model-name",
        "tiny",
        "--tokenizer",
        "bytes",
    ]
    command += ["--model-path", str(tiny_model("llama-groups")[0]), "--device", "Cpu", "--dtype", "Float32"]
    command += ["--tensor-parallel-size", "2", "--kv-cache-device-bytes", str(1 << 22), "--host", "127.0.0.1"]
    command += ["--port", "0", "--admin-port", "0", "--kv-events-port", "0", "--kv-replay-port", "0"]
    with log.open("wb") as output:
        engine = subprocess.Popen(
            command, stdout=output, stderr=output, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
    try:
        wait_until(lambda: bool(list_ranks(engine.pid)), 60, "no rank was started")
        if moment == "serving":
            wait_until(lambda: b"engine ready" in log.read_bytes(), 120, "the engine never got ready")
        ranks = list_ranks(engine.pid)
        assert ranks
        os.kill(engine.pid, signal.SIGKILL)
        engine.wait(10)
        wait_until(lambda: not list_living(ranks), 5, f"still there: {list_living(ranks)}")
    finally:
        if engine.poll() is None:
            engine.kill()
            engine.wait(10)
