"""Numbers of a replay."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from millpond_simulator.fleet import Outcome


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """One replay's figures; times in seconds."""

    num_requests: int
    hit_rate: float
    """Share of prompt tokens served from a replica's cache."""
    prediction_error: float
    """Sum of |predicted - real| cached tokens over the sum of real ones."""
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    share_within_2s: float
    output_tokens_per_second: float
    """While requests arrive: of an answer that is not over by then the part that has come."""


def compute_results(outcomes: Sequence[Outcome]) -> Results:
    """Figures over all requests that ended well.

    Raises:
        ValueError: when none did.
    """
    if not outcomes:
        raise ValueError("no request ended: the trace is empty or every replica failed")
    times = sorted(outcome.ttft_seconds for outcome in outcomes)
    cached = sum(outcome.cached_tokens for outcome in outcomes)
    errors = sum(abs(outcome.predicted_tokens - outcome.cached_tokens) for outcome in outcomes)
    return Results(
        num_requests=len(outcomes),
        hit_rate=cached / sum(outcome.num_tokens for outcome in outcomes),
        prediction_error=errors / cached if cached else 0.0,
        ttft_mean=sum(times) / len(times),
        ttft_p50=pick_percentile(times, 50),
        ttft_p99=pick_percentile(times, 99),
        share_within_2s=sum(time <= 2.0 for time in times) / len(times),
        output_tokens_per_second=compute_throughput(outcomes),
    )


def compute_throughput(outcomes: Sequence[Outcome]) -> float:
    """Output tokens per second from the first arrival to the last.

    Up to the last end it would say how slowly one long answer came that began late, and little of the rest.
    """
    first, last = min(o.arrived_at for o in outcomes), max(o.arrived_at for o in outcomes)
    if last <= first:
        last = max(outcome.ended_at for outcome in outcomes)
    produced = 0.0
    for outcome in outcomes:
        began_at = outcome.arrived_at + outcome.ttft_seconds
        share = (last - began_at) / max(outcome.ended_at - began_at, 1e-9)
        produced += outcome.output_tokens * min(max(share, 0.0), 1.0)
    return produced / max(last - first, 1e-9)


def pick_percentile(ordered: Sequence[float], percent: int) -> float:
    """Value at or above which `100 - percent` percent of an ordered sequence lie (nearest rank)."""
    return ordered[min(max(-(-len(ordered) * percent // 100) - 1, 0), len(ordered) - 1)]


def find_regressions(candidate: Results, baseline: Results, *, tolerance: float = 0.02) -> list[str]:
    """What a release gate holds against `candidate`: both time to first token and throughput must not be worse."""
    found: list[str] = []
    if candidate.ttft_mean > baseline.ttft_mean * (1 + tolerance):
        found.append(
            f"mean time to first token {candidate.ttft_mean:.3f} s, before {baseline.ttft_mean:.3f} s"
        )
    if candidate.output_tokens_per_second < baseline.output_tokens_per_second * (1 - tolerance):
        found.append(
            f"{candidate.output_tokens_per_second:.0f} output tokens/s, "
            f"before {baseline.output_tokens_per_second:.0f}"
        )
    return found
