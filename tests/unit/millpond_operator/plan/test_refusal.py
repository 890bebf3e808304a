"""A write refused for good shows in the status, once."""

from __future__ import annotations

from tests.support.operator_builders import NOW, SETTINGS, make_living, make_pod, make_pool, make_revision

from millpond_operator.api.status import PoolStatus
from millpond_operator.plan.planner import plan
from millpond_operator.plan.refusal import report_refusal


def test_the_refusal_is_the_reason_and_the_rest_stays() -> None:
    pool = make_pool(replicas=1)
    before = plan(make_living(pool, pods=(make_pod(revision=make_revision(pool)),)), SETTINGS, NOW).status
    assert before is not None
    status, note = report_refusal(before, "exceeded quota: services", generation=4, now=NOW)
    assert status is not None
    ready = status.conditions[0]
    assert (ready.type, ready.status, ready.reason) == ("Ready", "False", "ApiError")
    assert "exceeded quota: services" in ready.message
    assert status.observed_generation == 4
    assert {c.type for c in status.conditions} == {c.type for c in before.conditions}
    assert note is not None
    assert note.warning
    again, none = report_refusal(status, "exceeded quota: services", generation=4, now=NOW + 60)
    assert (again, none) == (None, None)


def test_another_refusal_changes_the_text_and_tells_no_second_event() -> None:
    first, note = report_refusal(PoolStatus(), "one", generation=1, now=NOW)
    assert first is not None
    assert note is not None
    second, none = report_refusal(first, "two", generation=1, now=NOW)
    assert second is not None
    assert none is None
