"""What several pools of a namespace share: names of models, and Secrets with keys that gateways read."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.operator_builders import (
    NOW,
    SETTINGS,
    get_reasons,
    make_living,
    make_pod,
    make_pool,
    make_revision,
)

from millpond_common.contract.reasons import ConditionReason
from millpond_operator.desired.kinds import POOL
from millpond_operator.observe.observer import find_name_keeper
from millpond_operator.observe.store import Store
from millpond_operator.plan.planner import plan


def make_body(name: str, *, created: str = "2026-01-01T00:00:00Z", **rest: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "team-a", "uid": name, "resourceVersion": "1"}
    metadata |= {"creationTimestamp": created, **rest.pop("metadata", {})}
    return {"metadata": metadata, "spec": rest}


OWN = make_body("smol", created="2026-01-02T00:00:00Z")
OLDER = make_body("first", model={"name": "smol"})


@pytest.mark.parametrize(
    ("other", "keeper"),
    [
        (OLDER, "first"),
        (make_body("last", created="2026-01-03T00:00:00Z", model={"name": "smol"}), ""),
        (make_body("first", model={"name": "other"}), ""),
        (make_body("first"), ""),
        (make_body("first", model={"name": "smol"}, gateway={"enabled": False}), ""),
        (
            make_body(
                "first", model={"name": "smol"}, metadata={"deletionTimestamp": "2026-01-04T00:00:00Z"}
            ),
            "",
        ),
        (make_body("alike", created="2026-01-02T00:00:00Z", model={"name": "smol"}), "alike"),
    ],
    ids=["older", "younger", "other name", "own name", "no gateway", "leaving", "same second"],
)
def test_the_oldest_pool_keeps_a_model_s_name(other: dict[str, Any], keeper: str) -> None:
    store = Store()
    store.replace(POOL, [OWN, other], version=1)
    sharing = [stored.body for stored in store.list_pools_of_model("team-a", "smol")]
    assert find_name_keeper(make_pool(replicas=1), sharing) == keeper
    assert find_name_keeper(make_pool(replicas=1, gateway={"enabled": False}), sharing) == ""


def test_pools_are_found_by_the_model_name_they_have_now() -> None:
    store = Store()
    store.put(POOL, OLDER)
    renamed = make_body("first", model={"name": "other"}, metadata={"resourceVersion": "2"})
    store.put(POOL, renamed)
    assert store.list_pools_of_model("team-a", "smol") == []
    assert [stored.body for stored in store.list_pools_of_model("team-a", "other")] == [renamed]
    assert store.list_pools_of_model("team-b", "other") == []
    store.remove(POOL, renamed)
    assert store.list_pools_of_model("team-a", "other") == []


def test_a_pool_whose_name_another_keeps_is_not_ready_and_says_what_to_write() -> None:
    pool = make_pool(replicas=1)
    pods = (make_pod(revision=make_revision(pool)),)
    told = get_reasons(plan(make_living(pool, pods=pods, name_keeper="first"), SETTINGS, NOW))
    status, reason, message = told["Ready"]
    assert (status, reason) == ("False", ConditionReason.CONFLICT)
    assert "from pool first" in message
    assert "spec.model.name" in message
    assert told["Progressing"][0] == "False", "nothing goes on by itself"


def test_keys_that_nobody_can_read_are_told_beside_what_serves_and_looked_up_again_soon() -> None:
    pool = make_pool(replicas=1)
    pods = (make_pod(revision=make_revision(pool)),)
    decided = plan(make_living(pool, pods=pods, missing_keys=("k",), forbidden_keys=("f",)), SETTINGS, NOW)
    told = get_reasons(decided)
    assert told["Ready"][:2] == ("True", ConditionReason.ANSWERING)
    assert told["Degraded"][:2] == ("True", ConditionReason.SECRET_NOT_FOUND)
    assert told["Degraded"][2] == (
        "callers with these keys are refused: Secret k does not exist in namespace ns; create it;"
        " Secret f may not be read; name it in the chart's rbac.secretNames"
    )
    assert decided.recheck_seconds <= 10
