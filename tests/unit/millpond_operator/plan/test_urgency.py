"""What is told at once and what may wait."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from millpond_operator.api.status import Condition, DrainingReplica, PoolStatus, ScalingStatus
from millpond_operator.plan.urgency import is_urgent


def make_condition(kind: str, status: Any, reason: str, message: str = "") -> Condition:
    return Condition(
        type=kind, status=status, reason=reason, message=message, last_transition_time=datetime.now(UTC)
    )


READY = make_condition("Ready", "False", "ReplicasNotReady")
MODEL = make_condition("ModelAvailable", "Unknown", "Pending")
STATUS = PoolStatus(
    observed_generation=3, replicas=1, desired_replicas=1, revision="a", conditions=(READY, MODEL)
)


def change(**values: Any) -> PoolStatus:
    return msgspec.structs.replace(STATUS, **values)


@pytest.mark.parametrize(
    "after",
    [
        change(observed_generation=4),
        change(desired_replicas=2),
        change(revision="b"),
        change(scaling=ScalingStatus(decision=2)),
        change(draining=(DrainingReplica(replica="p"),)),
        change(conditions=(make_condition("Ready", "True", "Answering"), MODEL)),
        change(conditions=(make_condition("Ready", "False", "CrashLoop"), MODEL)),
        change(conditions=(READY, MODEL, make_condition("Degraded", "True", "ImagePull"))),
    ],
)
def test_somebody_waits_for_it(after: PoolStatus) -> None:
    assert is_urgent(STATUS, after)


@pytest.mark.parametrize(
    "after",
    [
        change(replicas=2),
        change(ready_replicas=1),
        change(conditions=(make_condition("Ready", "False", "GatewayNotRouting"), MODEL)),
        change(conditions=(make_condition("Ready", "False", "ReplicasNotReady", "loading"), MODEL)),
        change(conditions=(READY, make_condition("ModelAvailable", "True", "ModelLoaded"))),
    ],
)
def test_a_step_on_the_way_waits_for_the_next(after: PoolStatus) -> None:
    assert not is_urgent(STATUS, after)


def test_the_first_status_is_urgent() -> None:
    assert is_urgent(PoolStatus(), STATUS)
