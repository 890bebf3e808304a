"""Every CEL rule of the CRD: one valid base object, changed in one place, accepted or refused with its message."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException
from tests.cluster.crd.conftest import Judge, read_causes
from tests.cluster.crd.rules import RULES, Rule
from tests.cluster.crd.schema import ROOT, walk_all
from tests.support.kube import Kube, Manifest
from tests.support.pools import changed, make_full_pool, make_pool, make_scaled_pool

pytestmark = pytest.mark.cluster

TRANSITION_RULES = {"model.source may not change its scheme"}
PASS = [
    pytest.param(rule, *change, id=f"{rule.message[:40]}-{change[0]}")
    for rule in RULES
    for change in rule.accepted
]
FAIL = [
    pytest.param(rule, *change, id=f"{rule.message[:40]}-{change[0]}")
    for rule in RULES
    for change in rule.refused
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.message[:40])
def test_the_base_object_is_valid(judge: Judge, rule: Rule) -> None:
    answer = judge.create(rule.base)
    assert answer.accepted, answer.causes


@pytest.mark.parametrize(("rule", "path", "value"), PASS)
def test_a_valid_change_is_accepted(judge: Judge, rule: Rule, path: str, value: Any) -> None:
    answer = judge.create(changed(rule.base, path, value))
    messages = [cause.message for cause in answer.causes]
    assert not [message for message in messages if rule.message in message], messages
    # A change may break another rule (a pool without memory limit, say); such a case is a mistake in the table.
    assert answer.accepted, messages


@pytest.mark.parametrize(("rule", "path", "value"), FAIL)
def test_an_invalid_change_is_refused_with_the_rule_s_message(
    judge: Judge, rule: Rule, path: str, value: Any
) -> None:
    answer = judge.create(changed(rule.base, path, value))
    assert [cause for cause in answer.causes if rule.message in cause.message], answer.causes


def list_rules() -> set[tuple[str, str]]:
    """Every rule in the file as (place, message)."""
    found = walk_all(ROOT, "")
    return {
        (path, rule["message"])
        for path, schema in found
        for rule in schema.get("x-kubernetes-validations", [])
    }


def test_every_rule_has_a_case() -> None:
    tested = {rule.message for rule in RULES} | TRANSITION_RULES
    messages = {message for _, message in list_rules()}
    assert [m for m in messages if not any(m.startswith(known) for known in tested)] == []
    assert [known for known in tested if not any(m.startswith(known) for m in messages)] == []


def test_every_message_says_what_to_write() -> None:
    words = ("write", "rename", "remove", "set", "choose", "make", "lower", "use a prefix")
    assert [message for _, message in list_rules() if not any(word in message for word in words)] == []


def test_the_scheme_of_a_source_cannot_change(crds: object, kube: Kube) -> None:
    pool = make_pool(model={"source": "hf://owner/repo"})
    kube.create(pool)
    assert kube.apply(changed(pool, "spec.model.source", "hf://owner/other"))["spec"]["model"][
        "source"
    ].endswith("other")
    with pytest.raises(ApiException) as refused:
        kube.apply(changed(pool, "spec.model.source", "http://host/file"))
    (cause,) = read_causes(refused.value)
    assert cause.field == "spec.model"
    assert "make a new pool" in cause.message


def test_a_list_refuses_two_entries_of_one_name(judge: Judge) -> None:
    """Unique keys come from listType map, for every list of named objects."""
    full: Manifest = make_full_pool()
    lists = {
        path: schema for path, schema in walk_all(ROOT, "") if schema.get("x-kubernetes-list-type") == "map"
    }
    named = [path[1:] for path in lists if path.startswith(".spec") and "disaggregation" not in path]
    assert len(named) >= 10
    for path in named:
        entries = read(full, path)
        answer = judge.create(changed(full, path, [*entries, entries[0]]))
        assert [c for c in answer.causes if "Duplicate value" in c.message and c.field.startswith(path)], path


def test_op_010_counts_of_pool_and_role_together_are_refused(judge: Judge) -> None:
    split = {"prefill": {"replicas": 2}, "decode": {"replicas": 3}}
    answer = judge.create(make_pool(disaggregation=split, replicas=4))
    assert [cause for cause in answer.causes if "each role has its own count" in cause.message]


def test_op_062_scaling_what_the_scaler_cannot_see_is_refused(judge: Judge) -> None:
    """Without the gateway there is no demand to read; a count per pool has no meaning where roles have theirs."""
    blind = judge.create(changed(make_scaled_pool(), "spec.gateway", {"enabled": False}))
    assert [cause for cause in blind.causes if "let an HPA own them" in cause.message]
    both = judge.create(make_pool(disaggregation={"prefill": {}, "decode": {}}, scaling={"maxReplicas": 3}))
    assert [cause for cause in both.causes if "each role has its own count" in cause.message]


def test_op_070_zero_with_nothing_that_could_wake_the_pool_is_refused(judge: Judge) -> None:
    to_zero = {"minReplicas": 0, "maxReplicas": 2, "coldStartHoldSeconds": 60}
    assert judge.create(make_pool(scaling=to_zero)).accepted
    asleep = judge.create(make_pool(scaling=to_zero, gateway={"enabled": False}))
    assert [cause for cause in asleep.causes if "wakes a pool at zero" in cause.message]


def read(pool: Manifest, path: str) -> list[Any]:
    place: Any = pool
    for part in path.split("."):
        place = place[part]
    assert isinstance(place, list)
    assert place, path
    return place
