"""The same requests without Kubernetes: two engines and a gateway as plain processes of this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass

import httpx

from demo.errors import DemoError
from demo.files import end_with_parent
from demo.steps import ROOT, TOOLS, run, say, step

LOGS = ROOT / "out" / "demo-local"
MODEL = "smollm2"


@dataclass(frozen=True, slots=True)
class Process:
    """One program, its log and the address that says whether it is ready."""

    name: str
    process: subprocess.Popen[bytes]
    ready_url: str

    def stop(self) -> None:
        """Ask it to drain; kill it if it does not go."""
        self.process.terminate()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def start_fleet(stack: ExitStack) -> str:
    """Start everything, wait until it is ready, and return the gateway's address."""
    with step("the model file"):
        path = (
            run([sys.executable, "hack/fetch-model"], what="fetching the model file").strip().splitlines()[-1]
        )
        say(path.rpartition("/")[2])
    with step("two engines as plain processes"):
        ports = [_find_port() for _ in range(2)]
        engines = [_start_engine(stack, number, port, path) for number, port in enumerate(ports)]
        for engine in engines:
            _wait(engine, seconds=120)
    with step("a gateway in front of them"):
        port, admin = _find_port(), _find_port()
        urls = ",".join(f"http://127.0.0.1:{port}" for port in ports)
        arguments = [
            "--static",
            f"{MODEL}={urls}",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--admin-port",
            str(admin),
        ]
        command = ["millpond_gateway", *arguments, "--peer-port", str(_find_port())]
        _wait(_start(stack, "gateway", command, f"http://127.0.0.1:{admin}/ready"), seconds=30)
        _wait_routable(f"http://127.0.0.1:{admin}/v1/report")
    return f"http://127.0.0.1:{port}"


def _start_engine(stack: ExitStack, number: int, port: int, model: str) -> Process:
    arguments = ["--model-name", MODEL, "--model-path", model, "--host", "127.0.0.1", "--port", str(port)]
    for flag in ("--admin-port", "--kv-events-port", "--kv-replay-port"):
        arguments += [flag, str(_find_port())]
    command = ["millpond_engine", "serve", *arguments, "--kv-cache-device-bytes", str(512 << 20)]
    return _start(stack, f"engine-{number}", command, f"http://127.0.0.1:{port}/ready")


def _start(stack: ExitStack, name: str, command: list[str], ready_url: str) -> Process:
    LOGS.mkdir(parents=True, exist_ok=True)
    with (LOGS / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], stdout=log, stderr=subprocess.STDOUT, cwd=ROOT,
            env={**os.environ, **TOOLS}, preexec_fn=end_with_parent,  # noqa: PLW1509 - single-threaded here
        )  # fmt: skip
    started = Process(name, process, ready_url)
    stack.callback(started.stop)
    return started


def _wait(waited: Process, *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    hint = f"read {(LOGS / waited.name).relative_to(ROOT)}.log"
    while time.monotonic() < deadline:
        if waited.process.poll() is not None:
            raise DemoError(f"{waited.name} ended with code {waited.process.returncode}", hint=hint)
        try:
            if httpx.get(waited.ready_url, timeout=2).status_code == 200:
                say(f"{waited.name} is ready")
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise DemoError(f"{waited.name} is not ready after {seconds:.0f} s", hint=hint)


def _wait_routable(report_url: str) -> None:
    """Wait until the gateway has seen both engines."""
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        report = json.loads(httpx.get(report_url, timeout=5).content)
        if sum(endpoint["routable"] for pool in report["pools"] for endpoint in pool["endpoints"]) == 2:
            return
        time.sleep(0.2)
    raise DemoError("the gateway does not route to both engines", hint="read out/demo-local/gateway.log")


def _find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
