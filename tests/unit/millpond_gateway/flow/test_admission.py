from __future__ import annotations

from typing import Any

import msgspec
import pytest

from millpond_gateway.flow.admission import (
    compute_hold_seconds,
    compute_retry_after,
    decide_admission,
    decide_expired,
    may_start,
)
from millpond_gateway.flow.records import Action, ClassPolicy, FlowReason, FlowSettings, PoolView

SETTINGS = FlowSettings()
INTERACTIVE = ClassPolicy(name="interactive", ttft_seconds=1.0)
SHEDDABLE = ClassPolicy(name="best-effort", ttft_seconds=1.0, sheddable=True)

IDLE: dict[str, Any] = {
    "num_endpoints": 2,
    "num_routable": 2,
    "queue_seconds": 0.0,
    "own_seconds": 0.1,
    "tokens_per_second": 20_000.0,
    "starting": False,
    "num_held": 0,
    "held_tokens": 0,
}
EMPTY = {
    **IDLE,
    "num_endpoints": 0,
    "num_routable": 0,
    "queue_seconds": None,
    "tokens_per_second": 0.0,
}
SATURATED = {**IDLE, "queue_seconds": 3.0}


@pytest.mark.parametrize(
    ("fields", "policy", "action", "reason", "status"),
    [
        (EMPTY, INTERACTIVE, Action.SHED, FlowReason.NO_REPLICA, 503),
        (EMPTY, SHEDDABLE, Action.SHED, FlowReason.NO_REPLICA, 503),
        ({**EMPTY, "starting": True}, INTERACTIVE, Action.HOLD, FlowReason.COLD_START, None),
        (SATURATED, INTERACTIVE, Action.HOLD, FlowReason.SATURATED, None),
        (SATURATED, SHEDDABLE, Action.SHED, FlowReason.SHEDDABLE, 429),
        ({**IDLE, "num_held": 3}, INTERACTIVE, Action.HOLD, FlowReason.QUEUED_BEHIND, None),
        ({**IDLE, "gated": True}, INTERACTIVE, Action.HOLD, FlowReason.CLASS_GATED, None),
        (IDLE, INTERACTIVE, Action.ADMIT, FlowReason.CAPACITY, None),
        (IDLE, SHEDDABLE, Action.ADMIT, FlowReason.CAPACITY, None),
    ],
)
def test_gw_120_admit_hold_or_shed(
    fields: dict[str, Any], policy: ClassPolicy, action: Action, reason: FlowReason, status: int | None
) -> None:
    verdict = decide_admission(PoolView(**fields), policy, SETTINGS)
    assert (verdict.action, verdict.reason) == (action, reason)
    if status is not None:
        assert verdict.status == status


def test_a_pool_that_never_scales_to_zero_holds_nothing_for_a_start() -> None:
    verdict = decide_admission(PoolView(**EMPTY), INTERACTIVE, SETTINGS)
    assert (verdict.action, verdict.reason) == (Action.SHED, FlowReason.NO_REPLICA)


def test_a_long_prompt_is_not_held_for_ever() -> None:
    own = {"own_seconds": 30.0}  # misses its target of 1 s on an idle replica too
    assert may_start(PoolView(**{**IDLE, **own}), INTERACTIVE, SETTINGS)
    assert may_start(PoolView(**{**IDLE, **own, "queue_seconds": 0.2}), INTERACTIVE, SETTINGS)
    assert not may_start(PoolView(**{**IDLE, **own, "queue_seconds": 0.3}), INTERACTIVE, SETTINGS)


def test_binding_is_late_until_capacity_frees() -> None:
    assert not may_start(PoolView(**SATURATED), INTERACTIVE, SETTINGS)
    assert may_start(PoolView(**{**SATURATED, "queue_seconds": 0.8}), INTERACTIVE, SETTINGS)
    assert not may_start(PoolView(**EMPTY), INTERACTIVE, SETTINGS)


def test_retry_after_follows_measured_speed() -> None:
    view = {**SATURATED, "queue_seconds": 4.9, "held_tokens": 100_000}
    assert compute_retry_after(PoolView(**view), INTERACTIVE, SETTINGS) == 9  # 4.0 s of queue + 5 s held
    faster = {**view, "tokens_per_second": 100_000.0}
    assert compute_retry_after(PoolView(**faster), INTERACTIVE, SETTINGS) == 5
    assert compute_retry_after(PoolView(**{**view, "held_tokens": 10**9}), INTERACTIVE, SETTINGS) == 120
    assert compute_retry_after(PoolView(**EMPTY), INTERACTIVE, SETTINGS) is None


@pytest.mark.parametrize(
    ("fields", "reason", "status"),
    [
        (SATURATED, FlowReason.HOLD_EXPIRED, 429),
        (EMPTY, FlowReason.NO_REPLICA, 503),
        ({**EMPTY, "starting": True}, FlowReason.COLD_START, 503),
    ],
)
def test_gw_067_an_expired_hold_answers_429_or_503_never_504(
    fields: dict[str, Any], reason: FlowReason, status: int
) -> None:
    verdict = decide_expired(PoolView(**fields), INTERACTIVE, SETTINGS)
    assert (verdict.reason, verdict.status) == (reason, status)
    assert verdict.retry_after_seconds is not None


@pytest.mark.parametrize(
    ("left", "hint"), [(None, 5), (0.0, 5), (179.2, 180), (1_000.0, 1_000), (90_000.0, 3_600)]
)
def test_op_069_retry_after_is_the_rest_of_the_measured_start(left: float | None, hint: int) -> None:
    view = PoolView(**{**EMPTY, "starting": True, "start_seconds_left": left})
    assert decide_expired(view, INTERACTIVE, SETTINGS).retry_after_seconds == hint
    never_held = msgspec.structs.replace(SETTINGS, cold_start_hold_seconds=0.0)
    verdict = decide_admission(view, INTERACTIVE, never_held)
    assert (verdict.reason, verdict.status) == (FlowReason.COLD_START, 503)
    assert verdict.retry_after_seconds == hint


def test_a_cold_start_is_held_longer_than_a_full_pool() -> None:
    assert compute_hold_seconds(FlowReason.COLD_START, SETTINGS) == 300.0
    assert compute_hold_seconds(FlowReason.SATURATED, SETTINGS) == 30.0


def test_every_reason_of_a_shed_request_has_a_client_status() -> None:
    from millpond_gateway.flow.records import Verdict

    for reason in FlowReason:
        assert Verdict(Action.SHED, reason).status in {413, 429, 503}
