from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from millpond_common.contract.reasons import ConditionReason, ConditionType
from millpond_operator.api import (
    DrainingReplica,
    Judgement,
    PoolStatus,
    RoleStatus,
    ScalingStatus,
    dump_status,
    get_condition,
    update_conditions,
)
from millpond_operator.api.status import MAX_MESSAGE_LENGTH

NOW = datetime(2026, 3, 1, 12, 0, 0, 987654, tzinfo=UTC)
LATER = NOW + timedelta(minutes=5)


def judge(
    status: bool | None = True, reason: ConditionReason = ConditionReason.ANSWERING, message: str = "m"
) -> Judgement:
    return Judgement(ConditionType.READY, status, reason, message)


def test_a_first_condition_starts_now_in_whole_seconds() -> None:
    (ready,) = update_conditions((), [judge()], generation=2, now=NOW)
    assert ready.last_transition_time == NOW.replace(microsecond=0)
    assert (ready.status, ready.reason, ready.observed_generation) == ("True", "Answering", 2)


def test_time_stands_while_the_status_stands() -> None:
    before = update_conditions((), [judge()], generation=2, now=NOW)
    (after,) = update_conditions(before, [judge(message="new")], generation=3, now=LATER)
    assert after.last_transition_time == before[0].last_transition_time
    assert (after.message, after.observed_generation) == ("new", 3)


@pytest.mark.parametrize(("status", "word"), [(False, "False"), (None, "Unknown")])
def test_time_moves_when_the_status_flips(status: bool | None, word: str) -> None:
    before = update_conditions((), [judge()], generation=2, now=NOW)
    (after,) = update_conditions(before, [judge(status, ConditionReason.CRASH_LOOP)], generation=2, now=LATER)
    assert (after.status, after.last_transition_time) == (word, LATER.replace(microsecond=0))


def test_conditions_come_in_one_order_and_unjudged_ones_go() -> None:
    stale = update_conditions(
        (), [Judgement(ConditionType.DEGRADED, False, ConditionReason.HEALTHY, "")], generation=1, now=NOW
    )
    found = [
        Judgement(ConditionType.MODEL_AVAILABLE, None, ConditionReason.PENDING, ""),
        Judgement(ConditionType.READY, False, ConditionReason.CREATING, ""),
    ]
    after = update_conditions(stale, found, generation=2, now=NOW)
    assert [condition.type for condition in after] == ["Ready", "ModelAvailable"]


def test_a_long_message_is_cut_to_what_the_crd_takes() -> None:
    (ready,) = update_conditions((), [judge(message="x" * 5000)], generation=1, now=NOW)
    assert len(ready.message) == MAX_MESSAGE_LENGTH
    assert ready.message.endswith("…")


def test_two_judgements_of_one_condition_are_a_defect() -> None:
    with pytest.raises(AssertionError, match="two judgements"):
        update_conditions((), [judge(), judge(False)], generation=1, now=NOW)


def test_absent_stays_out_and_zero_stays_in() -> None:
    status = PoolStatus(
        observed_generation=4,
        replicas=0,
        scaling=ScalingStatus(decision=0, observed_at=NOW.replace(microsecond=0)),
        roles=(RoleStatus(name="Both", replicas=0),),
        draining=(DrainingReplica(replica="a-1", num_requests=2),),
    )
    assert dump_status(status) == {
        "observedGeneration": 4,
        "replicas": 0,
        "scaling": {"decision": 0, "observedAt": "2026-03-01T12:00:00Z"},
        "roles": [{"name": "Both", "replicas": 0}],
        "draining": [{"replica": "a-1", "numRequests": 2}],
    }


def test_a_condition_is_found_by_type() -> None:
    status = PoolStatus(conditions=update_conditions((), [judge()], generation=1, now=NOW))
    ready = get_condition(status, ConditionType.READY)
    assert ready is not None
    assert ready.reason == "Answering"
    assert get_condition(status, ConditionType.DEGRADED) is None
