from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import autoscaler_replay

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


def test_the_form_of_2024_names_its_zone() -> None:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2024-05-10 00:00:00.009930+00:00,2162,5",
             "2024-05-10 00:00:01.017335+00:00,2399,6"]  # fmt: skip
    first, second = parse_azure_trace(lines)
    assert second.at - first.at == pytest.approx(1.007405)


def test_the_benchmark_replays_a_file_and_writes_the_house_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = tmp_path / "trace.csv", tmp_path / "figures.json"
    rows = [f"2023-11-16 18:{s // 60:02}:{s % 60:02}.5000000,4000,20" for s in range(1_800)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    monkeypatch.setattr("sys.argv", ["replay", "--trace", str(trace), "--json", str(out)])
    autoscaler_replay.main()
    assert "1 traces, 1800 requests" in capsys.readouterr().out
    figures = {figure["name"]: figure for figure in json.loads(out.read_text())}
    assert {"within target", "GPU-hours", "reversals", "downs in an outage", "overshoot", "recovery"} == set(
        figures
    )
    assert all(set(f) == {"name", "value", "unit", "peer", "ratio", "goal", "met"} for f in figures.values())
