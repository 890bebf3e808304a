"""How fresh the observer wants its reports."""

from __future__ import annotations

from tests.support.operator_builders import make_pod

from millpond_operator.observe.observer import (
    DRAINING_REPORT_SECONDS,
    MOVING_REPORT_SECONDS,
    SETTLED_REPORT_SECONDS,
    choose_report_age,
)


def test_op_040_reports_are_fresh_while_a_replica_of_a_settled_pool_drains() -> None:
    staying, leaving = make_pod("a"), make_pod("b", deleting=True)
    assert choose_report_age((staying, leaving), settled=True) == DRAINING_REPORT_SECONDS
    assert choose_report_age((staying,), settled=True) == SETTLED_REPORT_SECONDS
    assert choose_report_age((staying,), settled=False) == MOVING_REPORT_SECONDS
    assert choose_report_age((), settled=False) == SETTLED_REPORT_SECONDS, (
        "without a replica nothing is routed"
    )
