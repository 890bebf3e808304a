"""Start of the engine on the small real model: seconds until it is ready, and memory beyond weights and KV.

python -m benchmarks.engine_start --runs 3 --json results.json

Each run starts a process, waits until /ready says yes, sends one chat request and reads the process's peak memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine_process import MODEL_NAME, EngineProcess, fetch_model
from benchmarks.figures import Figure, report

KV_BYTES = 256 << 20
WEIGHT_BYTES = 2 * 134_515_008
"""SmolLM2-135M in bfloat16, its tied embedding once."""
_GOAL_SECONDS = 10.0
_GOAL_BYTES = 1 << 30


@dataclass(frozen=True)
class Start:
    """One start."""

    ready_seconds: float
    first_answer_seconds: float
    peak_bytes: int


def measure(model: Path) -> Start:
    """Start once; the clock begins before the process does."""
    started = time.monotonic()
    with EngineProcess(model, "--kv-cache-device-bytes", str(KV_BYTES)) as engine:
        url = engine.url
        while not _is_ready(url):
            time.sleep(0.02)
        ready = time.monotonic() - started
        body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            response.read()
        return Start(ready, time.monotonic() - started, engine.read_peak_bytes())


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def make_figures(starts: list[Start]) -> list[Figure]:
    """Medians over the runs; memory is the worst."""
    ready = statistics.median(start.ready_seconds for start in starts)
    answer = statistics.median(start.first_answer_seconds for start in starts)
    beyond = max(start.peak_bytes for start in starts) - WEIGHT_BYTES - KV_BYTES
    return [
        Figure("ready", ready, "s", goal="≤ 10", met=ready <= _GOAL_SECONDS),
        Figure("first answer", answer, "s"),
        Figure("peak memory", max(start.peak_bytes for start in starts) / (1 << 20), "MiB"),
        Figure(
            "memory beyond weights and KV",
            beyond / (1 << 20),
            "MiB",
            goal="≤ 1024",
            met=beyond <= _GOAL_BYTES,
        ),
    ]


def main() -> int:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model = fetch_model()
    figures = make_figures([measure(model) for _ in range(arguments.runs)])
    return report(figures, arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
