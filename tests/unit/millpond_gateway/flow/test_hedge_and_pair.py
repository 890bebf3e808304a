from __future__ import annotations

from typing import Any

import msgspec
import pytest

from millpond_gateway.flow.hedge import HedgeBudget, HedgeReason, decide_hedge
from millpond_gateway.flow.pair import (
    Leg,
    PairAction,
    PairPlan,
    PairView,
    make_prefill_body,
    plan_leg_failure,
    plan_pair,
)
from millpond_gateway.flow.records import HedgeView

LATE = HedgeView(
    waited_seconds=5.0,
    predicted_p99_seconds=2.0,
    provably_not_started=True,
    cached_tokens=0,
    prompt_tokens=1000,
    pool_saturated=False,
    num_other_candidates=2,
)


def make_budget(requests: int = 100) -> HedgeBudget:
    budget = HedgeBudget()
    for _ in range(requests):
        budget.note_request()
    return budget


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, HedgeReason.HEDGE),
        ({"waited_seconds": 1.9}, HedgeReason.NOT_LATE),
        ({"provably_not_started": False}, HedgeReason.STARTED),
        ({"cached_tokens": 600}, HedgeReason.WARM),
        ({"pool_saturated": True}, HedgeReason.SATURATED),
        ({"num_other_candidates": 0}, HedgeReason.NO_OTHER_REPLICA),
    ],
)
def test_only_a_late_cold_unstarted_request_is_hedged(change: dict[str, Any], reason: HedgeReason) -> None:
    assert decide_hedge(msgspec.structs.replace(LATE, **change), make_budget()) is reason


def test_hedges_stay_within_two_percent() -> None:
    budget = HedgeBudget()
    num_hedges = 0
    for _ in range(10_000):
        budget.note_request()
        if decide_hedge(LATE, budget) is HedgeReason.HEDGE:
            budget.spend()
            num_hedges += 1
    assert 195 <= num_hedges <= 200


PAIR = PairView(num_prefill=2, num_decode=2, can_aggregate=True)


def change(**fields: Any) -> PairView:
    return msgspec.structs.replace(PAIR, **fields)


@pytest.mark.parametrize(
    ("view", "action"),
    [
        (PAIR, PairAction.RUN_PAIR),
        (change(num_prefill=0), PairAction.RUN_AGGREGATED),
        (change(num_decode=0), PairAction.RUN_AGGREGATED),
        (change(num_prefill=0, can_aggregate=False), PairAction.FAIL),
    ],
)
def test_gw_037_a_decode_leg_never_runs_alone(view: PairView, action: PairAction) -> None:
    assert plan_pair(view) == PairPlan(action)


@pytest.mark.parametrize("leg", list(Leg))
def test_gw_116_a_failing_leg_aborts_the_other_and_falls_back(leg: Leg) -> None:
    other = Leg.DECODE if leg is Leg.PREFILL else Leg.PREFILL
    assert plan_leg_failure(change(num_prefill=0), leg) == PairPlan(PairAction.RUN_AGGREGATED, other)


def test_gw_117_a_prefill_that_fails_later_ends_in_a_fallback_or_an_error() -> None:
    view = change(prefill_attempts=2)
    assert plan_leg_failure(view, Leg.PREFILL).action is PairAction.RUN_AGGREGATED
    nowhere = change(prefill_attempts=2, can_aggregate=False)
    assert plan_leg_failure(nowhere, Leg.PREFILL) == PairPlan(PairAction.FAIL, Leg.DECODE)


def test_gw_118_another_prefill_is_tried_a_bounded_number_of_times() -> None:
    actions = [plan_leg_failure(change(prefill_attempts=n), Leg.PREFILL).action for n in (1, 2)]
    assert actions == [PairAction.RETRY_PREFILL, PairAction.RUN_AGGREGATED]


def test_nothing_is_repeated_once_the_client_has_a_byte() -> None:
    view = change(answer_began=True)
    assert plan_leg_failure(view, Leg.DECODE) == PairPlan(PairAction.FAIL, Leg.PREFILL)


def test_gw_113_the_prefill_leg_is_a_plain_one_token_request() -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 900,
        "max_completion_tokens": 900,
        "min_tokens": 5,
        "n": 4,
        "temperature": 0.3,
    }
    made = make_prefill_body(body)
    assert made == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0.3,
        "max_tokens": 1,
        "stream": False,
    }
    assert body["stream"] is True
