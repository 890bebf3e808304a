"""Replay a day of traffic through Millpond's autoscaling decision and through its rivals' rules.

A fluid model (open loop): it ranks rules, it proves nothing about products. By default the trace is
generated; --trace reads the public Azure form (TIMESTAMP, ContextTokens, GeneratedTokens).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.figures import Figure, report

from millpond_simulator.autoscaling.fluid import Outcome, Rule, Setting, compute_work, replay
from millpond_simulator.autoscaling.rules import HpaQueue, Keda, Millpond, Saturation, TwoLoops
from millpond_simulator.autoscaling.trace import Arrival, TraceShape, generate_trace, parse_azure_trace

RULES: dict[str, Callable[[Setting], Rule]] = {
    "millpond": Millpond,
    "hpa": lambda _: HpaQueue(),
    "keda": lambda _: Keda(),
    "wva": lambda _: Saturation(),
    "dynamo": TwoLoops,
}


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of one rule over the seeds."""

    name: str
    share: float
    gpu_hours: float
    reversals: float
    downs_in_outage: int


def main() -> int:
    """Replay, print the table, write the figures; the exit status says whether every goal is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--load-seconds", type=float, default=120.0, help="time to start a replica")
    parser.add_argument(
        "--trace", type=Path, help="CSV file in the public Azure form, instead of the generator"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    setting = Setting(load_seconds=arguments.load_seconds)
    traces = load_traces(arguments)
    rows = {key: summarise(key, traces, setting) for key in RULES}
    print(f"{len(traces)} traces, {sum(map(len, traces))} requests, start time {setting.load_seconds:.0f} s")
    print(f"{'rule':24} {'within 2 s':>10} {'GPU-hours':>10} {'reversals/h':>12} {'downs in outage':>16}")
    for row in rows.values():
        print(
            f"{row.name:24} {row.share:10.1%} {row.gpu_hours:10.1f} {row.reversals:12.2f} {row.downs_in_outage:16d}"
        )
    figures = make_figures(rows, *measure_step(setting), setting)
    return report(figures, arguments.json)


def load_traces(arguments: argparse.Namespace) -> list[list[Arrival]]:
    """One trace per seed, or the given file."""
    if arguments.trace:
        with arguments.trace.open(encoding="utf-8") as lines:
            return [parse_azure_trace(lines)]
    return [generate_trace(TraceShape(hours=arguments.hours), seed) for seed in range(arguments.seeds)]


def summarise(key: str, traces: list[list[Arrival]], setting: Setting) -> Row:
    """Medians over the traces; outages are replayed apart so that they do not colour the other columns."""
    outcomes = [replay(RULES[key](setting), trace, setting) for trace in traces]
    hours = traces[0][-1].at / 3600
    middle = traces[0][-1].at / 2
    dark = replace(setting, outage=(middle, middle + 600))
    outage = replay(RULES[key](setting), traces[0], dark)
    return Row(
        name=outcomes[0].name,
        share=statistics.median(o.share_within_target for o in outcomes),
        gpu_hours=statistics.median(o.gpu_hours for o in outcomes),
        reversals=statistics.median(o.count_reversals(hours) for o in outcomes),
        downs_in_outage=outage.downs_in_outage,
    )


def measure_step(setting: Setting) -> tuple[float, float]:
    """Overshoot and time to recover of Millpond when steady demand triples: medians over seven seeds."""
    steps = [replay_step(setting, seed) for seed in range(7)]
    return statistics.median(o for o, _ in steps), statistics.median(r for _, r in steps)


def replay_step(setting: Setting, seed: int) -> tuple[float, float]:
    """One step of three times the demand after a calm hour."""
    flat = TraceShape(hours=1.0, mean_per_second=3.0, diurnal_swing=0.0, noise=0.0, bursts_per_hour=0.0)
    calm = generate_trace(flat, 100 + seed)
    busy = generate_trace(replace(flat, mean_per_second=9.0), 200 + seed)
    trace = calm + [replace(arrival, at=arrival.at + 3600) for arrival in busy]
    outcome: Outcome = replay(Millpond(setting), trace, setting)
    need = sum(map(compute_work, busy)) / 3600 / setting.capacity / 0.8
    peak = max(count for at, count in outcome.changes if at >= 3600)
    reached = next((at for at, count in outcome.changes if at >= 3600 and count >= need), float("inf"))
    return peak / need - 1, reached - 3600 + setting.load_seconds


def make_figures(rows: dict[str, Row], overshoot: float, recovery: float, setting: Setting) -> list[Figure]:
    """What is published; the peer is the rule of an HPA on queue length in the same replay."""
    ours, hpa = rows["millpond"], rows["hpa"]
    limit = setting.load_seconds + 2 * setting.loop_seconds
    saved = 1 - ours.gpu_hours / hpa.gpu_hours

    def beside(name: str, value: float, peer: float, unit: str, goal: str, *, met: bool) -> Figure:
        return Figure(name, value, unit, peer, value / peer if peer else None, goal, met)

    return [
        beside("within target", ours.share, hpa.share, "share", "at least the HPA rule",
               met=ours.share >= hpa.share),
        beside("GPU-hours", ours.gpu_hours, hpa.gpu_hours, "h", "30 % fewer than the HPA rule",
               met=saved >= 0.3),
        beside("reversals", ours.reversals, hpa.reversals, "1/h", "at most 2", met=ours.reversals <= 2),
        beside("downs in an outage", ours.downs_in_outage, hpa.downs_in_outage, "changes", "0",
               met=ours.downs_in_outage == 0),
        Figure("overshoot", overshoot, "share", goal="at most 20 %", met=overshoot <= 0.2),
        Figure("recovery", recovery, "s", goal=f"start time + 2 loops ({limit:.0f} s)", met=recovery <= limit),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
