"""CPU per request and per chunk of Millpond's gateway, beside vllm-router and sglang-router in the same run.

Trivial replicas, one load generator, everything on this machine. CPU is what /proc says the router's processes
used between start and end of a load. The peers live in an environment of their own that this command makes. The
gateway runs in the form that its image ships, compiled first where it is not; `--interpreted` measures the other.

    python -m benchmarks.gateway_cost --json results.json
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes.util
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, write_figures
from benchmarks.gateway_load import Load

PEERS = ("vllm-router==0.1.17", "sglang-router==0.3.2")
GOAL_PEER, FLOOR_PEER = "sglang-router", "vllm-router"
_OWN = "millpond-gateway"
_MAX_LONG_CORES = 0.05
"""Cores per request/s with prompts of 100k tokens."""
_COMPILE = Path(__file__).resolve().parents[1] / "gateway" / "compile.py"
_COMPILED = _COMPILE.parents[1] / "build" / "gateway-compiled"
ALLOCATOR = (
    "PYTHONMALLOC=malloc",
    "MALLOC_CONF=narenas:1,background_thread:true,dirty_decay_ms:2000,muzzy_decay_ms:0",
)
"""Environment of the image beside LD_PRELOAD."""
_TICKS = os.sysconf("SC_CLK_TCK")
_NUM_REPLICAS = 4
_LOAD_SECONDS = 300


@dataclass
class Figures:
    """What was measured of one system under one load; medians over the rounds."""

    system: str
    load: str
    cpu_milliseconds_per_request: float
    cpu_microseconds_per_chunk: float | None
    requests_per_second: float
    p50_milliseconds: float
    p99_milliseconds: float
    first_byte_p50_milliseconds: float
    num_failed: int
    spread_percent: float
    """Of the CPU figure over the rounds: (max - min) / median."""
    memory_mebibytes: float


@dataclass
class Router:
    """One system that can stand between clients and replicas."""

    name: str
    make_command: Callable[[int, list[int]], list[str]]
    environment: dict[str, str] = field(default_factory=dict)


def make_routers(peers: Path | None, compiled: Path | None) -> list[Router]:
    """Millpond and the peers."""
    routers = [Router("millpond-gateway", partial(make_millpond_command, compiled=compiled))]
    if peers is not None:
        for name, module in {
            "vllm-router": "vllm_router.launch_router",
            "sglang-router": "sglang_router.launch_router",
        }.items():
            command = partial(make_peer_command, str(peers / "bin" / "python"), module)
            routers.append(Router(name, command))
    return routers


def compile_gateway() -> Path:
    """The compiled gateway, made now unless it is current; goes first on PYTHONPATH."""
    subprocess.run([sys.executable, str(_COMPILE), str(_COMPILED)], check=True, stdout=subprocess.DEVNULL)
    return _COMPILED


def make_millpond_command(port: int, replicas: list[int], *, compiled: Path | None = None) -> list[str]:
    """The gateway with its defaults; the access log is on, and goes nowhere."""
    static = ",".join(f"http://127.0.0.1:{replica}" for replica in replicas)
    return [
        *_start_gateway(compiled),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--admin-port",
        "0",
        "--static",
        f"m={static}",
    ]


def _start_gateway(compiled: Path | None) -> list[str]:
    """As the image starts it: compiled, on jemalloc (Debian's libjemalloc2) where this machine has it."""
    if compiled is None:
        return [sys.executable, "-m", "millpond_gateway"]
    library = ctypes.util.find_library("jemalloc")
    allocator = [] if library is None else [f"LD_PRELOAD={library}", *ALLOCATOR]
    return ["env", f"PYTHONPATH={compiled}", *allocator, sys.executable, "-m", "millpond_gateway"]


def ask_version(compiled: Path | None) -> str:
    """Version, form and allocator of the gateway that is measured, by its own word."""
    command = [*_start_gateway(compiled), "--version"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def make_peer_command(python: str, module: str, port: int, replicas: list[int]) -> list[str]:
    """A peer with its cache-aware policy."""
    urls = [f"http://127.0.0.1:{replica}" for replica in replicas]
    flags = [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--policy",
        "cache_aware",
        "--prometheus-port",
        str(find_port()),
    ]
    return [python, "-m", module, *flags, "--worker-urls", *urls]


def find_port() -> int:
    """A free port."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def run_process(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A child for the time of a block."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def read_cpu_seconds(pid: int) -> float:
    """User and system time of a process and its children so far."""
    return sum(_read_own_cpu_seconds(each) for each in [pid, *list_children(pid)])


def _read_own_cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def list_children(pid: int) -> list[int]:
    """Descendants of a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *list_children(int(child))]
    return found


def read_memory_mebibytes(pid: int) -> float:
    """Resident memory of a process and its children."""
    total = 0
    for each in [pid, *list_children(pid)]:
        for line in Path(f"/proc/{each}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                total += int(line.split()[1])
    return total / 1024


def wait_until_routing(port: int, seconds: float = 60.0) -> None:
    """Until a real request passes."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]}).encode()
    deadline = time.monotonic() + seconds
    while True:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions", body, {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError as error:
            if time.monotonic() > deadline:
                raise SystemExit(f"the router on port {port} does not route: {error}") from error
        time.sleep(0.2)


def send(load: Load) -> dict[str, Any]:
    """Run the load generator in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.gateway_load", json.dumps(asdict(load))]
    found: dict[str, Any] = json.loads(
        subprocess.run(command, check=True, capture_output=True, timeout=_LOAD_SECONDS).stdout
    )
    return found


def measure(system: str, name: str, load: Load, pid: int, rounds: int) -> Figures:
    """Medians over the rounds, after one round that warms up."""
    send(Load(**{**asdict(load), "num_requests": max(load.num_connections, load.num_requests // 5)}))
    cpu, per_chunk, results = [], [], []
    for _ in range(rounds):
        before = read_cpu_seconds(pid)
        result = send(load)
        used = read_cpu_seconds(pid) - before
        cpu.append(1000 * used / max(1, result["num_ok"]))
        per_chunk.append(1e6 * used / result["num_chunks"] if result["num_chunks"] else 0.0)
        results.append(result)
    latencies = sorted(value for result in results for value in result["latencies"])
    first = sorted(value for result in results for value in result["first_bytes"])
    median = statistics.median(cpu)
    return Figures(
        system=system,
        load=name,
        cpu_milliseconds_per_request=median,
        cpu_microseconds_per_chunk=statistics.median(per_chunk) if load.chunks else None,
        requests_per_second=statistics.median(result["num_ok"] / result["seconds"] for result in results),
        p50_milliseconds=1000 * latencies[len(latencies) // 2],
        p99_milliseconds=1000 * latencies[int(len(latencies) * 0.99)],
        first_byte_p50_milliseconds=1000 * first[len(first) // 2],
        num_failed=sum(result["num_failed"] for result in results),
        spread_percent=100 * (max(cpu) - min(cpu)) / median if median else 0.0,
        memory_mebibytes=read_memory_mebibytes(pid),
    )


def make_loads(port: int, scale: float) -> dict[str, Load]:
    """The loads of one system, by name."""

    def count(number: int) -> int:
        return max(40, int(number * scale))

    return {
        "300 B, 1 connection": Load(port, 1, count(3000)),
        "300 B, 32 connections": Load(port, 32, count(20_000)),
        "16 KB, 32 connections": Load(port, 32, count(10_000), 16_000),
        "400 KB (100k tokens), 8 connections": Load(port, 8, count(600), 400_000),
        "400 streams of 50 chunks": Load(port, 400, 400, 300, chunks=50),
    }


def make_peers(folder: Path) -> Path:
    """The peers' environment; made once."""
    stamp = folder / "peers.txt"
    wanted = "\n".join(PEERS)
    if not stamp.exists() or stamp.read_text() != wanted:
        uv = [sys.executable, "-m", "uv"]
        subprocess.run(
            [*uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)], check=True
        )
        subprocess.run(
            [*uv, "pip", "install", "--quiet", "--python", str(folder / "bin" / "python"), *PEERS], check=True
        )
        stamp.write_text(wanted)
    return folder


def run_system(
    router: Router | None, replicas: list[int], replica_pid: int, *, rounds: int, scale: float, part: str
) -> list[Figures]:
    """All loads of one system; None measures the replicas directly."""
    port = replicas[0] if router is None else find_port()
    loads = {name: load for name, load in make_loads(port, scale).items() if part in name}
    if router is None:
        return [measure("direct", name, load, replica_pid, rounds) for name, load in loads.items()]
    with run_process(router.make_command(port, replicas)) as process:
        wait_until_routing(port)
        return [measure(router.name, name, load, process.pid, rounds) for name, load in loads.items()]


def show(figures: list[Figures]) -> None:
    """One table per load, ratios against the first peer of it."""
    direct = {entry.load: entry for entry in figures if entry.system == "direct"}
    print(
        f"{'load':38}{'system':18}{'CPU ms/req':>11}{'µs/chunk':>10}{'req/s':>9}{'added p50 ms':>14}{'p99 ms':>9}{'failed':>8}{'spread':>8}{'MiB':>6}"
    )
    for load in dict.fromkeys(entry.load for entry in figures):
        for entry in (one for one in figures if one.load == load):
            added = entry.p50_milliseconds - direct[load].p50_milliseconds if load in direct else 0.0
            chunk = (
                f"{entry.cpu_microseconds_per_chunk:.1f}"
                if entry.cpu_microseconds_per_chunk is not None
                else ""
            )
            print(
                f"{load:38}{entry.system:18}{entry.cpu_milliseconds_per_request:11.3f}{chunk:>10}"
                f"{entry.requests_per_second:9.0f}{added:14.3f}{entry.p99_milliseconds:9.2f}"
                f"{entry.num_failed:8}{entry.spread_percent:7.0f}%{entry.memory_mebibytes:6.0f}"
            )


def make_figures(measured: list[Figures]) -> list[Figure]:
    """The published numbers: CPU against the peers of the same run, and what has no goal as it is."""
    found: list[Figure] = []
    systems = {(entry.system, entry.load): entry for entry in measured}
    for own in (entry for entry in measured if entry.system == _OWN):
        for peer in (GOAL_PEER, FLOOR_PEER):
            other = systems.get((peer, own.load))
            if other is not None:
                found.append(compare(own, other))
        cores = own.cpu_milliseconds_per_request / 1000
        if "100k tokens" in own.load:
            goal = f"<= {_MAX_LONG_CORES}"
            found.append(
                Figure(
                    f"{own.load}: cores per request/s",
                    cores,
                    "cores",
                    goal=goal,
                    met=cores <= _MAX_LONG_CORES,
                )
            )
        found.append(Figure(f"{own.load}: requests/s", own.requests_per_second, "1/s"))
        direct = systems.get(("direct", own.load))
        if direct is not None:
            added = own.p50_milliseconds - direct.p50_milliseconds
            found.append(Figure(f"{own.load}: added p50", added, "ms"))
        found.append(
            Figure(f"{own.load}: failed", own.num_failed, "requests", goal="0", met=not own.num_failed)
        )
    return found


def compare(own: Figures, other: Figures) -> Figure:
    """CPU of one load beside one peer's: per chunk where there are chunks, else per request."""
    if own.cpu_microseconds_per_chunk is not None and other.cpu_microseconds_per_chunk is not None:
        name, unit = f"{own.load}: CPU per chunk against {other.system}", "µs"
        value, peer = own.cpu_microseconds_per_chunk, other.cpu_microseconds_per_chunk
    else:
        name, unit = f"{own.load}: CPU per request against {other.system}", "ms"
        value, peer = own.cpu_milliseconds_per_request, other.cpu_milliseconds_per_request
    ratio = value / peer if peer else None
    return Figure(name, value, unit, peer, ratio, "ratio <= 1.0", ratio is not None and ratio <= 1.0)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the number of requests")
    parser.add_argument("--only", action="append", help="systems to measure; default all")
    parser.add_argument("--loads", default="", help="measure only loads whose name contains this")
    parser.add_argument(
        "--peers", type=Path, default=Path("build/bench-peers"), help="environment of the peers"
    )
    parser.add_argument("--interpreted", action="store_true", help="measure the gateway uncompiled")
    arguments = parser.parse_args()
    compiled = None if arguments.interpreted else compile_gateway()
    print(ask_version(compiled))
    wanted = arguments.only or ["direct", "millpond-gateway", "vllm-router", "sglang-router"]
    peers = make_peers(arguments.peers) if any("router" in name for name in wanted) else None
    how: dict[str, Any] = {"rounds": arguments.rounds, "scale": arguments.scale, "part": arguments.loads}
    figures: list[Figures] = []
    ports = [find_port() for _ in range(_NUM_REPLICAS)]
    with run_process([sys.executable, "-m", "benchmarks.gateway_replica", *map(str, ports)]) as replicas:
        wait_until_routing(ports[-1])
        if "direct" in wanted:
            figures += run_system(None, ports, replicas.pid, **how)
        for router in make_routers(peers, compiled):
            if router.name in wanted:
                figures += run_system(router, ports, replicas.pid, **how)
    show(figures)
    if arguments.json:
        write_figures(arguments.json, make_figures(figures))


if __name__ == "__main__":
    main()
