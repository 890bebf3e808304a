"""An engine of two ranks as a process: it serves, a lost rank ends it loudly, and no rank outlives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

FLAGS = ["--host", "127.0.0.1", "--port", "0", "--admin-port", "0", "--kv-events", "off", "--model-name", "m",
         "--tensor-parallel-size", "2", "--device", "Cpu", "--kv-cache-device-bytes", str(64 << 20)]  # fmt: skip


class Engine:
    """A started engine, its log lines and its port."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        self.port = int(self.wait_for("listening")["port"])
        self.loaded = self.wait_for("engine loaded")
        self.wait_for("engine ready")

    def wait_for(self, event: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line))
            if self.lines[-1]["event"] == event:
                return self.lines[-1]
        raise AssertionError(self.lines)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def ranks(self) -> list[int]:
        """Ids of the other ranks' processes."""
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        found = [int(pid) for file in children for pid in file.read_text().split()]
        return [pid for pid in found if b"rank_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@contextmanager
def start(model: Path, *flags: str) -> Iterator[Engine]:
    command = [sys.executable, "-m", "millpond_engine", "serve", "--model-path", str(model), *FLAGS, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield Engine(process)
    finally:
        process.kill()
        process.wait()


def _wait_gone(pid: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":
            return
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


def test_a_lost_rank_ends_the_engine_with_an_error(smollm2_gguf: Path) -> None:
    with start(smollm2_gguf) as engine:
        assert engine.loaded["tensor_parallel_size"] == 2
        body = {"model": "m", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
        status, answer = engine.ask("/v1/completions", body)
        assert status == 200
        assert "Paris" in json.loads(answer)["choices"][0]["text"]
        assert engine.ask("/ready")[0] == 200
        (rank,) = engine.ranks()
        os.kill(rank, signal.SIGKILL)
        failed = engine.wait_for("engine failed")
        assert "RankLostError: rank 1 was ended by signal 9" in failed["failure"]
        assert engine.process.wait(20) == 1


@pytest.mark.slow  # `test_eng_072_no_rank_outlives_a_killed_engine` shows it with a small model
def test_no_rank_outlives_a_killed_engine_of_the_real_model(smollm2_gguf: Path) -> None:
    with start(smollm2_gguf) as engine:
        (rank,) = engine.ranks()
        engine.process.kill()
        _wait_gone(rank, 10)


def test_no_rank_outlives_a_drained_engine(tiny_model: Callable[[str], Any]) -> None:
    with start(tiny_model("llama-groups")[0], "--tokenizer", "bytes", "--dtype", "Float32") as engine:
        (rank,) = engine.ranks()
        engine.process.terminate()
        assert engine.process.wait(20) == 0
        _wait_gone(rank, 1)
