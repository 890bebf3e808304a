"""When the scaling loop looks again."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.operator_builders import make_pod, make_pool, make_snapshot
from tests.support.scaled_pool import make_report

from millpond_common.contract.gateway_report import PoolReport
from millpond_operator.plan.autoscale import ScalingView
from millpond_operator.plan.pace import choose_pause, find_next_look, is_called, is_quiet
from millpond_operator.scaling.aggregate import GatewaySample


def report(**changes: Any) -> PoolReport:
    made = make_report(make_pod("a"), rate=0.0)
    fields = {name: getattr(made, name) for name in made.__struct_fields__}
    return PoolReport(
        **fields | {"last_request_seconds_ago": None, "output_tokens_per_second_60": 0.0} | changes
    )


def pause(
    *reports: PoolReport,
    num_silent: int = 0,
    count_manager: str = "",
    scalers: tuple[str, ...] = (),
    **spec: Any,
) -> float:
    snapshot = make_snapshot(make_pool(**spec), count_manager=count_manager, scalers=scalers)
    samples = tuple(GatewaySample(f"g{n}/1", 0.0, found) for n, found in enumerate(reports))
    view = ScalingView(gateways=samples, num_gateways=len(samples), num_silent=num_silent)
    return choose_pause(snapshot, view, interval=15.0, rest_interval=60.0)


def test_only_a_fixed_pool_that_nobody_uses_is_looked_at_seldom() -> None:
    assert pause(report(), replicas=1) == 60.0
    assert pause(replicas=0) == 60.0
    assert pause(report(), num_silent=1, replicas=1) == 15.0
    assert pause(report(), report(held_requests=1), replicas=1) == 15.0
    assert pause(report(), scaling={"minReplicas": 1, "maxReplicas": 2}) == 15.0


def test_numbers_that_an_external_scaler_reads_stay_fresh() -> None:
    assert pause(report(), replicas=1, scalers=("keda-hpa",)) == 15.0
    assert pause(report(), replicas=1, count_manager="kube-controller-manager") == 15.0
    assert pause(report(), replicas=1, count_manager="kubectl") == 60.0


@pytest.mark.parametrize(
    "changes",
    [
        {"held_requests": 1},
        {"held_tokens": 1},
        {"queued_tokens": 1},
        {"uncached_tokens_per_second_15": 0.5},
        {"uncached_tokens_per_second_60": 0.5},
        {"output_tokens_per_second_60": 0.5},
        {"last_request_seconds_ago": 59.0},
    ],
)
def test_any_use_ends_the_rest(changes: dict[str, Any]) -> None:
    assert is_quiet(report())
    assert is_quiet(report(last_request_seconds_ago=61.0))
    assert not is_quiet(report(**changes))


def test_a_request_wakes_a_pool_even_when_its_client_has_left() -> None:
    assert not is_called(report(), since_seconds=15.0)
    assert not is_called(report(last_request_seconds_ago=16.0), since_seconds=15.0)
    assert is_called(report(last_request_seconds_ago=14.0), since_seconds=15.0)
    assert is_called(report(held_requests=1, last_request_seconds_ago=99.0), since_seconds=15.0)


@pytest.mark.parametrize("start", [0.0, 3.0, 7.4, 7.6, 14.9, 1_700_000_000.3])
@pytest.mark.parametrize("wanted", [15.0, 60.0])
def test_looks_fall_on_the_turns_of_the_namespace_about_when_they_are_wanted(
    start: float, wanted: float
) -> None:
    first = find_next_look(start, wanted, namespace="ns", interval=15.0)
    assert wanted - 7.6 <= first - start <= wanted + 7.6
    second = find_next_look(first + 0.05, wanted, namespace="ns", interval=15.0)
    assert second - first == pytest.approx(wanted)
    other = find_next_look(start + 1.0, 15.0, namespace="ns", interval=15.0)
    assert (other - first) % 15.0 == pytest.approx(0.0, abs=1e-3) or (first - other) % 15.0 == pytest.approx(
        0.0, abs=1e-3
    ), "pools of a namespace share their turns"
    assert find_next_look(0.0, 15.0, namespace="a", interval=15.0) != find_next_look(
        0.0, 15.0, namespace="b", interval=15.0
    )
