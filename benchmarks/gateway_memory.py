"""Memory of the gateway under thousands of concurrent streams: before, at the peak, and after they ended.

python -m benchmarks.gateway_memory --streams 5000 --json results.json
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.figures import Figure, write_figures
from benchmarks.gateway_cost import (
    ask_version,
    compile_gateway,
    find_port,
    make_millpond_command,
    read_memory_mebibytes,
    run_process,
    send,
    wait_until_routing,
)
from benchmarks.gateway_load import Load

_NUM_REPLICAS = 4
_SETTLE_SECONDS = 12
_MAX_PEAK = 256
_MAX_KEPT = 1.1
"""What is kept after the streams, against the level before: the index of what was routed is meant to stay."""


@dataclass(frozen=True)
class MemoryFigures:
    """Resident memory of the gateway in MiB, and what became of the streams."""

    num_streams: int
    before: float
    peak: float
    after: float
    num_ok: int
    num_failed: int
    seconds: float


class Sampler:
    """Highest resident memory of a process while a block runs."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.peak = 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.2):
            self.peak = max(self.peak, read_memory_mebibytes(self._pid))


def measure(
    num_streams: int, chunks: int, gap_milliseconds: int, compiled: Path | None = None
) -> MemoryFigures:
    """Run the streams once through a fresh gateway."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else max(soft, 65_536), hard)
    )
    ports = [find_port() for _ in range(_NUM_REPLICAS)]
    port = find_port()
    with (
        run_process([sys.executable, "-m", "benchmarks.gateway_replica", *map(str, ports)]),
        run_process(make_millpond_command(port, ports, compiled=compiled)) as gateway,
    ):
        wait_until_routing(port)
        send(Load(port, 32, 500))
        before = read_memory_mebibytes(gateway.pid)
        with Sampler(gateway.pid) as sampler:
            load = Load(
                port, num_streams, num_streams, 2000, chunks=chunks, gap_milliseconds=gap_milliseconds
            )
            result = send(load)
        time.sleep(_SETTLE_SECONDS)
        after = read_memory_mebibytes(gateway.pid)
    return MemoryFigures(
        num_streams, before, sampler.peak, after, result["num_ok"], result["num_failed"], result["seconds"]
    )


def make_figures(measured: MemoryFigures) -> list[Figure]:
    """The published numbers."""
    back = measured.after <= measured.before * _MAX_KEPT
    return [
        Figure("peak", measured.peak, "MiB", goal=f"<= {_MAX_PEAK}", met=measured.peak <= _MAX_PEAK),
        Figure(
            "after against before",
            measured.after,
            "MiB",
            measured.before,
            measured.after / measured.before,
            f"ratio <= {_MAX_KEPT}",
            back,
        ),
        Figure("failed", measured.num_failed, "streams", goal="0", met=measured.num_failed == 0),
    ]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=5000)
    parser.add_argument("--chunks", type=int, default=20)
    parser.add_argument("--gap", type=int, default=500, help="milliseconds between chunks")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--interpreted", action="store_true", help="measure the gateway uncompiled")
    arguments = parser.parse_args()
    compiled = None if arguments.interpreted else compile_gateway()
    print(ask_version(compiled))
    try:
        figures = measure(arguments.streams, arguments.chunks, arguments.gap, compiled)
    except subprocess.TimeoutExpired as error:
        raise SystemExit("the streams did not end in time: give fewer, or a longer --gap") from error
    print(
        f"{figures.num_streams} streams: {figures.before:.0f} MiB before, {figures.peak:.0f} at the peak,"
        f" {figures.after:.0f} after; {figures.num_ok} complete, {figures.num_failed} failed in {figures.seconds:.0f} s"
    )
    if arguments.json:
        write_figures(arguments.json, make_figures(figures))


if __name__ == "__main__":
    main()
