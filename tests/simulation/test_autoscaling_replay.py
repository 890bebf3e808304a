from __future__ import annotations

import pytest

from millpond_simulator.autoscaling.fluid import Setting, replay
from millpond_simulator.autoscaling.rules import HpaQueue, Millpond
from millpond_simulator.autoscaling.trace import TraceShape, generate_trace, parse_azure_trace

SHAPE = TraceShape(hours=24.0)


@pytest.mark.parametrize("seed", [10])
def test_as_014_bursty_traffic_makes_few_reversals(seed: int) -> None:
    trace = generate_trace(SHAPE, seed)
    setting = Setting()
    ours, hpa = (replay(rule, trace, setting) for rule in (Millpond(setting), HpaQueue()))
    assert (
        ours.count_reversals(SHAPE.hours) <= 2.0
    )  # two an hour over a day; six hours leave room for one burst more
    assert ours.share_within_target >= hpa.share_within_target
    assert ours.gpu_hours <= 0.7 * hpa.gpu_hours


def test_an_outage_of_metrics_under_load_takes_no_replica_away() -> None:
    trace = generate_trace(TraceShape(hours=2.0), 5)
    setting = Setting(outage=(3000.0, 3600.0))
    outcome = replay(Millpond(setting), trace, setting)
    assert outcome.downs_in_outage == 0
    assert len(outcome.changes) > 1


def test_the_public_form_is_read() -> None:
    lines = [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:50.9951690,372,28",
        "2023-11-16 18:15:46.6805900,374,44",
    ]
    first, second = parse_azure_trace(lines)
    assert (first.at, first.context_tokens, first.generated_tokens) == (0.0, 374, 44)
    assert second.at == pytest.approx(4.314579)
