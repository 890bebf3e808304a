"""Replay traces through the real router over fake engines in virtual time, and compare rules of choice.

An open-loop model of the decision rules: it ranks rules and proves nothing about products or about a real
engine. By default the traces are generated; --trace reads files in the public Mooncake form. The foreign rules
are simplified re-implementations. --replicas, --slow and --restart try other fleets; generated sessions come as
often for each replica in all of them. Prints tables; --json writes the published numbers, --raw every run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from benchmarks.figures import Figure, write_figures

from millpond_gateway.routing.records import EndpointView
from millpond_gateway.routing.router import Router
from millpond_gateway.routing.settings import RoutingSettings
from millpond_gateway.routing.splitmix import SplitMix
from millpond_simulator.engine import EngineModel
from millpond_simulator.fleet import Fleet, FleetSettings, Sharing, make_request_view
from millpond_simulator.generate import WORKLOADS, Workload, generate_trace
from millpond_simulator.results import Results, compute_results, find_regressions
from millpond_simulator.rules import Rule
from millpond_simulator.trace import BLOCK_TOKENS, TraceRequest, compute_oracle_hit_rate, read_trace, speed_up

GATEWAYS = (1, 4, 16)
_REPLICAS = 8
"""The fleet that the workloads' rates are made for."""
_MAX_OF_ONE = 1.1
_MAX_BLOCK_BYTES = 40


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One replay."""

    trace: str
    seed: int
    rule: Rule
    num_gateways: int
    sharing: Sharing
    oracle_hit_rate: float
    results: Results
    gossip_bytes_per_request: float


def main() -> None:
    """Replay, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10, help="seeds 1 to this")
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="only these generated traces")
    parser.add_argument(
        "--gateways", type=int, choices=GATEWAYS, default=GATEWAYS[-1], help="most gateways tried"
    )
    parser.add_argument("--requests", type=int, default=4000, help="length of each generated trace")
    parser.add_argument("--replicas", type=int, default=_REPLICAS)
    parser.add_argument("--slow", type=int, default=0, help="so many of the replicas are half as fast")
    parser.add_argument(
        "--restart", type=float, help="second at which a replica begins anew with an empty cache"
    )
    parser.add_argument(
        "--blocks", type=int, default=1000, help="prefix cache of a replica, in blocks of 512 tokens"
    )
    parser.add_argument("--trace", type=Path, action="append", default=[], help="file in the Mooncake form")
    parser.add_argument("--speed", type=float, default=1.0, help="replay this many times as fast")
    parser.add_argument("--json", type=Path, help="write the published numbers to this file")
    parser.add_argument("--raw", type=Path, help="write every run to this file")
    arguments = parser.parse_args()
    fleet = FleetSettings(engines=make_engines(arguments), restart_at=arguments.restart)
    runs: list[Run] = []
    for name, seed, trace in load_traces(arguments):
        runs += compare_rules(name, seed, trace, fleet)
        runs += compare_gateways(name, seed, trace, fleet, most=arguments.gateways)
    print_rules(runs)
    print_gateways(runs)
    cost = measure_decision()
    print("\nOne decision over 16 replicas, prompt of 1,000 blocks, half of it shared (CPU time)")
    print(f"choose {cost['choose_microseconds']:.0f} µs, reserve {cost['reserve_microseconds']:.0f} µs")
    regressions = list(find_gate_failures(runs))
    for line in regressions:
        print(f"gate: {line}")
    if arguments.json:
        write_figures(arguments.json, make_figures(runs, cost))
    if arguments.raw:
        arguments.raw.write_text(json.dumps([msgspec.to_builtins(run) for run in runs], indent=1) + "\n")
    if regressions:
        raise SystemExit(1)


def make_engines(arguments: argparse.Namespace) -> tuple[EngineModel, ...]:
    """Engines of the fleet; the slow ones come last."""
    fast = EngineModel(num_blocks=arguments.blocks)
    slow = msgspec.structs.replace(fast, tokens_per_second=fast.tokens_per_second / 2)
    num_slow: int = min(arguments.slow, arguments.replicas)
    num_fast: int = arguments.replicas - num_slow
    return (fast,) * num_fast + (slow,) * num_slow


def find_gate_failures(runs: Sequence[Run]) -> Iterator[str]:
    """Where Auto is worse than round robin in time to first token or in throughput."""
    for run in runs:
        if run.rule is not Rule.AUTO or run.num_gateways > 1:
            continue
        baseline = next(
            other for other in runs if _is(other, run.trace, Rule.ROUND_ROBIN, 1) and other.seed == run.seed
        )
        for regression in find_regressions(run.results, baseline.results):
            yield f"{run.trace}, seed {run.seed}: {regression}"


def make_figures(runs: Sequence[Run], cost: dict[str, float]) -> list[Figure]:
    """The published numbers; each is a mean over the seeds of one trace."""
    found: list[Figure] = []
    for trace in dict.fromkeys(run.trace for run in runs):
        own = [run for run in runs if _is(run, trace, Rule.AUTO, 1)]
        ttft, oracle = _mean_ttft(own), _mean([run.oracle_hit_rate for run in own])
        hits = _mean([run.results.hit_rate for run in own])
        found.append(Figure(f"{trace}: hit rate against the oracle", hits, "", oracle, hits / oracle))
        for rule in (Rule.ROUND_ROBIN, Rule.LEAST_REQUESTS, Rule.WEIGHTED_SUM):
            peer = _mean_ttft([run for run in runs if _is(run, trace, rule, 1)])
            found.append(_compare(f"{trace}: mean TTFT against {rule.value}", ttft, peer, 1.0))
        for num_gateways in GATEWAYS[1:]:
            shared = _find_shared(runs, trace, num_gateways)
            if shared:
                name = f"{trace}: mean TTFT of {num_gateways} gateways against one"
                found.append(_compare(name, _mean_ttft(shared), ttft, _MAX_OF_ONE))
    found.append(Figure("one choice over 16 replicas, 1,000 blocks", cost["choose_microseconds"], "µs"))
    size = cost["index_bytes_per_block"]
    found.append(
        Figure("index", size, "bytes/block", goal=f"<= {_MAX_BLOCK_BYTES}", met=size <= _MAX_BLOCK_BYTES)
    )
    return found


def _compare(name: str, value: float, peer: float, most: float) -> Figure:
    ratio = value / peer
    return Figure(name, value, "s", peer, ratio, f"ratio <= {most:g}", ratio <= most)


def _mean_ttft(runs: Sequence[Run]) -> float:
    return _mean([run.results.ttft_mean for run in runs])


def load_traces(arguments: argparse.Namespace) -> Iterator[tuple[str, int, list[TraceRequest]]]:
    """Traces with their names and seeds; the seed also drives the ties of every rule."""
    for seed in range(1, arguments.seeds + 1):
        if arguments.trace:
            for path in arguments.trace:
                yield path.stem, seed, speed_up(read_trace(path), arguments.speed)
        else:
            for name in arguments.workload or WORKLOADS:
                workload = scale_workload(WORKLOADS[name], arguments)
                yield name, seed, speed_up(generate_trace(workload, seed=seed), arguments.speed)


def scale_workload(workload: Workload, arguments: argparse.Namespace) -> Workload:
    """As many sessions and requests for each replica as the workload has on a fleet of the usual size."""
    share = arguments.replicas / _REPLICAS
    return msgspec.structs.replace(
        workload,
        num_requests=round(arguments.requests * share),
        sessions_per_second=workload.sessions_per_second * share,
    )


def compare_rules(name: str, seed: int, trace: Sequence[TraceRequest], fleet: FleetSettings) -> list[Run]:
    """Every rule behind one gateway."""
    return [replay(name, seed, trace, msgspec.structs.replace(fleet, rule=rule)) for rule in Rule]


def compare_gateways(
    name: str, seed: int, trace: Sequence[TraceRequest], fleet: FleetSettings, *, most: int
) -> list[Run]:
    """Policy Auto behind several gateways, with and without shared decisions."""
    return [
        replay(name, seed, trace, msgspec.structs.replace(fleet, num_gateways=num_gateways, sharing=sharing))
        for num_gateways in GATEWAYS[1:]
        if num_gateways <= most
        for sharing in Sharing
    ]


def replay(name: str, seed: int, trace: Sequence[TraceRequest], settings: FleetSettings) -> Run:
    """One replay and its figures."""
    fleet = Fleet(settings, seed=seed)
    outcomes = fleet.replay(trace)
    return Run(
        trace=name,
        seed=seed,
        rule=settings.rule,
        num_gateways=settings.num_gateways,
        sharing=settings.sharing,
        oracle_hit_rate=compute_oracle_hit_rate(trace),
        results=compute_results(outcomes),
        gossip_bytes_per_request=sum(gateway.num_sent_bytes for gateway in fleet.gateways) / len(trace),
    )


def print_rules(runs: Sequence[Run]) -> None:
    """Mean over seeds of each rule behind one gateway, with the spread of the mean time."""
    print(
        "Rules behind one gateway: prefix hit, oracle, mean (sigma over seeds) and p99 time to first token,"
    )
    print("share within 2 s, output tokens per second")
    for trace in dict.fromkeys(run.trace for run in runs):
        for rule in Rule:
            print_row(rule.value, [run for run in runs if _is(run, trace, rule, 1)])


def print_gateways(runs: Sequence[Run]) -> None:
    """Policy Auto behind 1, 4 and 16 gateways."""
    print("\nAuto behind several gateways; bytes are gossip to all peers, per request")
    for trace in dict.fromkeys(run.trace for run in runs):
        for num_gateways in GATEWAYS:
            for sharing in Sharing:
                same = [
                    run for run in runs if _is(run, trace, Rule.AUTO, num_gateways) and run.sharing is sharing
                ]
                print_row(f"{num_gateways:2} {sharing.value}", same)
            print_ratios(runs, trace, num_gateways)


def print_ratios(runs: Sequence[Run], trace: str, num_gateways: int) -> None:
    """Times of several gateways over those of one, seed by seed: a trace near its capacity doubles them by chance."""
    shared = _find_shared(runs, trace, num_gateways)
    if num_gateways == 1 or not shared:
        return
    one = {run.seed: run.results for run in runs if _is(run, trace, Rule.AUTO, 1)}
    for name, pick in (("mean", _pick_mean), ("p99", _pick_p99)):
        ratios = sorted(pick(run.results) / pick(one[run.seed]) for run in shared)
        of_means = _mean([pick(run.results) for run in shared]) / _mean([pick(of) for of in one.values()])
        print(
            f"{trace:12} {num_gateways:2} to one: {name} {of_means:.3f}, median of the seeds"
            f" {statistics.median(ratios):.3f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


def print_row(label: str, runs: Sequence[Run]) -> None:
    """One line of a table."""
    if not runs:
        return
    results = [run.results for run in runs]
    means = [result.ttft_mean for result in results]
    spread = statistics.stdev(means) if len(means) > 1 else 0.0
    print(
        f"{runs[0].trace:12} {label:14} {_mean([r.hit_rate for r in results]):5.2f}"
        f" {_mean([run.oracle_hit_rate for run in runs]):5.2f} {_mean(means):8.2f} ({spread:.2f})"
        f" {_mean([r.ttft_p99 for r in results]):7.2f} {_mean([r.share_within_2s for r in results]):6.0%}"
        f" {_mean([r.output_tokens_per_second for r in results]):8.0f}"
        f" {_mean([run.gossip_bytes_per_request for run in runs]):8.0f} B"
    )


def measure_decision(num_requests: int = 2000) -> dict[str, float]:
    """CPU microseconds of one choice and one reservation, and index bytes per block."""
    router = Router("benchmark", RoutingSettings(), seed=1)
    router.update_endpoints(
        EndpointView(
            uid=f"r{n}", pod="", address="", ready=True, block_tokens=BLOCK_TOKENS, num_blocks=100_000
        )
        for n in range(16)
    )
    generator = SplitMix(1)
    shared = tuple(range(500))
    requests = [
        TraceRequest(0, 1000 * BLOCK_TOKENS, 1, shared + tuple(generator.next() >> 1 for _ in range(500)))
        for _ in range(num_requests)
    ]
    views = [make_request_view(request, "") for request in requests]
    choosing = reserving = 0.0
    for number, view in enumerate(views):
        started = time.thread_time()
        choice = router.choose(view, number * 0.01)
        chosen = time.thread_time()
        reservation = router.reserve(view, choice, number * 0.01)
        choosing += chosen - started
        reserving += time.thread_time() - chosen
        router.first_token(reservation.id, number * 0.01 + 0.5)
        router.release(reservation.id)
    routed = router.index.routed
    return {
        "choose_microseconds": choosing / num_requests * 1e6,
        "reserve_microseconds": reserving / num_requests * 1e6,
        "index_bytes_per_block": routed.num_bytes / max(routed.num_distinct_blocks, 1),
    }


def _find_shared(runs: Sequence[Run], trace: str, num_gateways: int) -> list[Run]:
    found = [run for run in runs if _is(run, trace, Rule.AUTO, num_gateways)]
    return [run for run in found if run.sharing is Sharing.SHARED]


def _pick_mean(results: Results) -> float:
    return results.ttft_mean


def _pick_p99(results: Results) -> float:
    return results.ttft_p99


def _is(run: Run, trace: str, rule: Rule, num_gateways: int) -> bool:
    return (run.trace, run.rule, run.num_gateways) == (trace, rule, num_gateways)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


if __name__ == "__main__":
    main()
