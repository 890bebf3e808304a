"""What a grammar costs: time of a step of constrained sequences beside the same step of free ones.

    python -m benchmarks.engine_structured [--batch 16] [--steps 40] [--rounds 6] [--threads 2] [--json FILE]

Runs the scheduler and the torch runner in this process (no HTTP), SmolLM2-135M in bfloat16 at temperature 1, with
OpenMP set up as the server does it. Free and constrained batches take turns, so that both see the same machine; the
figures are medians over all decode steps, of time and of the processor time of all threads, which work of others
on the machine moves less. Then, without a model, the time to compile the schemas and to make a mask.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.engine_process import fetch_model
from benchmarks.figures import Figure, report, tell

Times = dict[str, list[tuple[float, float]]]
"""(seconds, processor seconds) of steps, by kind of batch."""
MOST = 0.05
"""Share of a step that masks and their application may add."""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "paid", "trial"]}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
            "required": ["street", "city"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "email", "tags", "address"],
    "additionalProperties": False,
}
ENDLESS = {"type": "array", "items": PERSON, "minItems": 100_000}
"""No sequence ends while it is measured."""


def main() -> int:
    """Measure, print, write JSON. Exit status 1 if a goal is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=40, help="decode steps of each round")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    bench = Bench(arguments.batch, arguments.steps, arguments.threads)
    times: Times = {"free": [], "half": [], "all": []}
    kinds = [("free", 0), ("all", arguments.batch), ("half", arguments.batch // 2)]
    for seed in range(arguments.rounds):
        kinds.append(
            kinds.pop(0)
        )  # whoever comes first on a machine that changes its mind comes last the next time
        for kind, number in kinds:
            times[kind] += bench.measure(number, seed)
            tell(
                f"round {seed}  {kind:5} {1000 * statistics.median(wall for wall, _ in times[kind]):7.2f} ms a step"
            )
    figures = make_figures(times, arguments.batch, bench.mask_seconds)
    figures += [*bench.measure_masks(), bench.measure_compile()]
    return report(figures, arguments.json)


def make_figures(times: Times, batch: int, mask_seconds: list[float]) -> list[Figure]:
    """Medians, and what the constrained steps take beyond the free ones."""
    free, half, whole = (
        statistics.median(wall for wall, _ in times[kind]) for kind in ("free", "half", "all")
    )
    cpu = {kind: statistics.median(own for _, own in both) for kind, both in times.items()}
    goal = f"<= {MOST:.0%}"
    return [
        Figure(f"step of {batch} free sequences", 1000 * free, "ms"),
        Figure(f"step of {batch} constrained sequences", 1000 * whole, "ms", 1000 * free, whole / free),
        *(
            Figure(name, 100 * (value / free - 1), "%", None, None, goal, value / free - 1 <= MOST)
            for name, value in (("added, all constrained", whole), ("added, half constrained", half))
        ),
        Figure(f"processor time of a step of {batch} free sequences", 1000 * cpu["free"], "ms"),
        Figure("added processor time, all constrained", 100 * (cpu["all"] / cpu["free"] - 1), "%"),
        Figure("added processor time, half constrained", 100 * (cpu["half"] / cpu["free"] - 1), "%"),
        Figure("masks of one step", 1000 * statistics.median(mask_seconds), "ms"),
        Figure(
            "masks of one step, 99th percentile",
            1000 * sorted(mask_seconds)[len(mask_seconds) * 99 // 100],
            "ms",
        ),
    ]


class Bench:
    """Model, tokenizer and grammar of one run."""

    def __init__(self, batch: int, steps: int, threads: int) -> None:
        from millpond_common.contract.engine_config import EngineConfig, KvCacheConfig
        from millpond_engine.grammar.library import Library
        from millpond_engine.runner.threads import prepare_threads
        from millpond_engine.text.load import load_tokenizer

        os.environ["OMP_NUM_THREADS"] = str(threads)
        prepare_threads()  # before torch is loaded, as the server does it
        import torch

        from millpond_engine.runner import make_torch_runner

        torch.set_num_threads(threads)
        model = fetch_model()
        config = EngineConfig(
            model_name="smollm2",
            model_path=str(model),
            dtype="BFloat16",
            device="Cpu",
            kv_cache=KvCacheConfig(device_bytes=1 << 30),
        )
        tell("loading the model")
        self._batch = batch
        self._steps = steps
        self._runner = make_torch_runner(config)
        self._tokenizer = load_tokenizer(str(model))
        self._library = Library(self._tokenizer)
        self._grammar = self.compile(ENDLESS)
        self.mask_seconds: list[float] = []
        self.measure(batch, 99)  # warm up: pages, threads, the lexer
        self.mask_seconds.clear()

    def compile(self, schema: dict[str, Any]) -> Any:
        """A schema's grammar."""
        from millpond_engine.grammar.spec import GrammarKind, GrammarSpec

        spec = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))
        facts = self._tokenizer.facts
        return self._library.compile(spec, vocabulary=facts.vocabulary_size, ends=facts.eos_token_ids)

    def make_masks(self, guides: Any) -> Any:
        """The library's masks, timed."""
        started = time.perf_counter()
        masks = self._library.make_masks(guides)
        self.mask_seconds.append(time.perf_counter() - started)
        return masks

    def measure(self, constrained: int, seed: int) -> list[tuple[float, float]]:
        """Seconds and processor seconds of each decode step of a batch in which so many sequences follow the grammar."""
        from millpond_engine.core.scheduler import Scheduler
        from millpond_engine.engine.step import Engine
        from millpond_engine.records.request import Request, SamplingParams, StopParams
        from millpond_engine.records.settings import SchedulerSettings

        rng = random.Random(seed)
        engine = Engine(
            Scheduler(SchedulerSettings(prefix_cache=False), self._runner.info), self._runner, masker=self
        )
        for number in range(self._batch):
            request = Request(
                str(number),
                tuple(rng.randrange(1000, 40_000) for _ in range(32)),
                SamplingParams(temperature=1.0, seed=seed * 1000 + number),
                StopParams(max_tokens=self._steps, ignore_eos=True),
                arrival_seconds=0.0,
                grammar=self._grammar if number < constrained else None,
            )
            refusal = engine.add(request)
            assert refusal is None, refusal
        found = []
        while engine.has_work():
            started, used = time.perf_counter(), time.process_time()
            report = engine.step()
            seconds = time.perf_counter() - started, time.process_time() - used
            if report is not None and report.plan.num_tokens == len(report.plan.rows) == self._batch:
                found.append(seconds)
        return found

    def measure_masks(self) -> list[Figure]:
        """Time of one mask along random texts of the schema, without a model."""
        import numpy as np

        rng, times = random.Random(7), []
        for _ in range(10):
            guide = self._grammar.start()
            for _ in range(200):
                started = time.perf_counter()
                mask = guide.look()
                times.append(time.perf_counter() - started)
                allowed = np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0]
                if guide.advance(int(rng.choice(allowed))):
                    break
        times.sort()
        return [
            Figure("one mask, median", 1e6 * times[len(times) // 2], "us"),
            Figure("one mask, 99th percentile", 1e6 * times[len(times) * 99 // 100], "us"),
        ]

    def measure_compile(self) -> Figure:
        """Time to compile a schema that has not been seen."""
        times = []
        for number in range(50):
            schema = {**PERSON, "properties": {**PERSON["properties"], f"p{number}": {"type": "string"}}}  # type: ignore[dict-item]
            started = time.perf_counter()
            self.compile(schema)
            times.append(time.perf_counter() - started)
        return Figure("compiling a schema, median", 1000 * statistics.median(times), "ms")


if __name__ == "__main__":
    sys.exit(main())
