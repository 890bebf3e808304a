from __future__ import annotations

import pytest

from millpond_gateway.flow.gate import Gate
from millpond_gateway.flow.records import Action, FlowReason, FlowSettings

SETTINGS = FlowSettings(max_body_bytes=1000, max_in_flight=2, max_in_flight_bytes=1500)


def test_requests_and_bytes_in_flight_are_bounded_before_the_body_is_read() -> None:
    gate = Gate(SETTINGS)
    assert gate.enter(content_length=900).action is Action.ADMIT
    refused = gate.enter(content_length=700)
    assert (refused.reason, refused.status, refused.retry_after_seconds) == (
        FlowReason.TOO_MANY_BYTES,
        503,
        1,
    )
    assert gate.enter(content_length=600).action is Action.ADMIT
    assert gate.enter(content_length=0).reason is FlowReason.TOO_MANY_REQUESTS
    gate.leave(body_bytes=900)
    assert gate.enter(content_length=100).action is Action.ADMIT
    assert (gate.num_open, gate.num_bytes) == (2, 700)


def test_a_body_over_the_limit_is_413_by_head_or_by_growth() -> None:
    gate = Gate(SETTINGS)
    announced = gate.enter(content_length=1001)
    assert (announced.reason, announced.status) == (FlowReason.BODY_TOO_LARGE, 413)
    assert gate.enter(content_length=None).action is Action.ADMIT
    assert gate.grow(more_bytes=800, total_bytes=800).action is Action.ADMIT
    assert gate.grow(more_bytes=300, total_bytes=1100).status == 413
    gate.leave(body_bytes=800)
    assert (gate.num_open, gate.num_bytes) == (0, 0)


def test_a_growing_body_counts_against_bytes_in_flight() -> None:
    gate = Gate(SETTINGS)
    gate.enter(content_length=900)
    gate.enter(content_length=None)
    assert gate.grow(more_bytes=600, total_bytes=600).action is Action.ADMIT
    assert gate.grow(more_bytes=1, total_bytes=601).reason is FlowReason.TOO_MANY_BYTES


def test_gw_043_descriptors_run_out_before_the_body_is_read() -> None:
    gate = Gate(FlowSettings(), max_descriptors=100)
    assert gate.enter(content_length=10, open_descriptors=98).action is Action.ADMIT
    refused = gate.enter(content_length=10, open_descriptors=99)
    assert (refused.reason, refused.status, refused.retry_after_seconds) == (
        FlowReason.TOO_MANY_DESCRIPTORS,
        503,
        1,
    )
    assert gate.num_open == 1


@pytest.mark.parametrize("size", [33_000, 129_000, 640_000, 32 * 1024 * 1024])
def test_gw_103_bodies_up_to_32_megabytes_pass_by_default(size: int) -> None:
    assert Gate(FlowSettings()).enter(content_length=size).action is Action.ADMIT


def test_leaving_more_than_entered_is_our_fault() -> None:
    with pytest.raises(AssertionError):
        Gate(SETTINGS).leave(body_bytes=0)
