from __future__ import annotations

from typing import Any

import pytest

from millpond_operator.api import InferencePool, SpecError, list_roles, parse_pool
from millpond_operator.api.spec import DEFAULT_CLASSES

LIMITS = {"limits": {"nvidia.com/gpu": 1}}


def make_pool(spec: dict[str, Any] | None = None, **metadata: Any) -> InferencePool:
    return parse_pool(make_object(spec, **metadata))


def make_object(spec: dict[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": "millpond.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": "small", "namespace": "apps", "uid": "u-1", "generation": 3, **metadata},
        "spec": {"model": {"source": "hf://o/m"}, "resources": LIMITS, **(spec or {})},
    }


def test_four_lines_are_a_pool() -> None:
    pool = make_pool()
    assert pool.key == ("apps", "small")
    assert pool.model_name == "small"
    assert pool.model_revision == "main"
    assert pool.spec.scheduling.classes == DEFAULT_CLASSES
    assert pool.spec.rollout.drain_seconds == 300
    assert not pool.is_deleting
    assert not pool.is_paused


def test_names_given_by_the_user_win() -> None:
    pool = make_pool({"model": {"source": "hf://o/m", "name": "chat", "revision": "abc"}})
    assert (pool.model_name, pool.model_revision) == ("chat", "abc")


def test_only_the_hub_has_revisions() -> None:
    assert make_pool({"model": {"source": "file:///m"}}).model_revision is None


def test_paused_and_deleting_come_from_the_metadata() -> None:
    pool = make_pool(annotations={"millpond.dev/paused": "true"}, deletionTimestamp="2026-01-01T00:00:00Z")
    assert pool.is_paused
    assert pool.is_deleting


def test_fields_of_a_later_release_are_passed_over() -> None:
    pool = make_pool({"wings": 2, "gateway": {"routing": "Prefix", "tint": "blue"}})
    assert pool.spec.gateway.routing == "Prefix"


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"replicas": "two"}, "spec.replicas"),
        ({"model": {"source": 7}}, "spec.model.source"),
        ({"model": {}}, "spec.model"),
        (
            {"scheduling": {"classes": [{"name": "a", "priority": "high"}]}},
            "spec.scheduling.classes[0].priority",
        ),
        ({"engine": {"dtype": "Int4"}}, "spec.engine.dtype"),
        ({"resources": {"limits": {"cpu": 1.5}}}, "spec.resources.limits[...]"),
    ],
)
def test_an_unreadable_field_is_named(spec: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError) as caught:
        make_pool(spec)
    assert caught.value.path == path
    assert str(caught.value).startswith(f"{path}: ")


def test_no_object_at_all_is_an_error_too() -> None:
    with pytest.raises(SpecError, match=r"^object: Expected `object`"):
        parse_pool("pool")


def test_neither_count_nor_scaling_is_one_replica() -> None:
    (role,) = list_roles(make_pool())
    assert (role.role, role.replicas, role.scaling) == ("Both", 1, None)


def test_a_count_of_zero_is_not_absent() -> None:
    (role,) = list_roles(make_pool({"replicas": 0}))
    assert role.replicas == 0


def test_with_scaling_nobody_states_a_count() -> None:
    (role,) = list_roles(make_pool({"scaling": {"maxReplicas": 4}}))
    assert role.replicas is None
    assert role.scaling is not None
    assert (role.scaling.min_replicas, role.scaling.max_replicas) == (1, 4)


def test_op_010_role_counts_are_each_role_s_own() -> None:
    split = {"prefill": {"replicas": 2}, "decode": {"scaling": {"maxReplicas": 3}}}
    prefill, decode = list_roles(make_pool({"disaggregation": split}))
    assert (prefill.role, prefill.replicas, prefill.scaling) == ("Prefill", 2, None)
    assert (decode.role, decode.replicas) == ("Decode", None)


def test_a_role_inherits_resources_and_adds_its_template() -> None:
    own = {"limits": {"nvidia.com/gpu": 2}}
    split = {"prefill": {"resources": own, "template": {"priorityClassName": "high"}}, "decode": {}}
    prefill, decode = list_roles(
        make_pool({"disaggregation": split, "template": {"runtimeClassName": "nvidia"}})
    )
    assert prefill.resources.limits == own["limits"]
    assert decode.resources.limits == LIMITS["limits"]
    assert [t.runtime_class_name or t.priority_class_name for t in prefill.templates] == ["nvidia", "high"]


def test_a_role_without_any_resources_is_named() -> None:
    data = make_object({"disaggregation": {"prefill": {"resources": LIMITS}, "decode": {}}})
    del data["spec"]["resources"]
    with pytest.raises(SpecError) as caught:
        list_roles(parse_pool(data))
    assert caught.value.path == "spec.disaggregation.decode.resources"
