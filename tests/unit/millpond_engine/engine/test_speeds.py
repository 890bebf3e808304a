from __future__ import annotations

import pytest

from millpond_engine.engine.costs import StepCosts
from millpond_engine.engine.speeds import SpeedMeter, StepSample
from millpond_engine.records.step import RowStep, StepPlan


def test_no_data_is_none() -> None:
    meter = SpeedMeter()
    assert meter.prefill_tokens_per_second is None
    assert meter.decode_tokens_per_second is None
    meter.add(StepSample(prefill_tokens=100, decode_rows=0, seconds=0.0))
    assert meter.prefill_tokens_per_second is None


def test_pure_steps_measure_their_kind() -> None:
    meter = SpeedMeter()
    meter.add(StepSample(prefill_tokens=500, decode_rows=0, seconds=0.5))
    meter.add(StepSample(prefill_tokens=0, decode_rows=8, seconds=0.04))
    assert meter.prefill_tokens_per_second == pytest.approx(1000)
    assert meter.decode_tokens_per_second == pytest.approx(200)
    assert meter.decode_seconds_per_step == pytest.approx(0.04)


def test_a_mixed_step_takes_the_decode_part_off() -> None:
    meter = SpeedMeter()
    meter.add(StepSample(prefill_tokens=0, decode_rows=8, seconds=0.04))
    meter.add(StepSample(prefill_tokens=100, decode_rows=8, seconds=0.14))
    assert meter.prefill_tokens_per_second == pytest.approx(1000)
    assert meter.decode_seconds_per_step == pytest.approx(0.04)


def test_short_chunks_do_not_measure_the_prefill_speed() -> None:
    meter = SpeedMeter()
    meter.add(StepSample(prefill_tokens=3, decode_rows=0, seconds=0.1))
    assert meter.prefill_tokens_per_second is None


def test_costs_are_found_again_from_steps() -> None:
    costs = StepCosts()
    for i in range(60):
        new, start = 1 + (i * 7) % 50, (i * 131) % 2000
        plan = StepPlan(i, (RowStep(0, start, new),))
        costs.learn(plan, new * 3e-4 + (start + new) * 2e-6)
    ratio = costs.weigh(0, 1000) / costs.weigh(1000, 0)
    assert ratio == pytest.approx(2e-6 / 3e-4, rel=0.05)


def test_costs_start_with_new_tokens_alone() -> None:
    costs = StepCosts()
    assert costs.weigh(2, 5000) == 2 * costs.weigh(1, 1)
