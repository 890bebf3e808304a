"""Notes of who owns a field: a create's become those of an apply, and nobody else's change."""

from __future__ import annotations

from typing import Any

from millpond_common.contract.labels import MANAGER, STATUS_MANAGER
from millpond_operator.plan.adoption import adopt_fields, is_create_note


def make_entry(manager: str, operation: str, fields: dict[str, Any], **rest: Any) -> dict[str, Any]:
    return {"manager": manager, "operation": operation, "apiVersion": "v1", "fieldsV1": fields, **rest}


OTHERS = [
    make_entry("kubectl-edit", "Update", {"f:spec": {}}),
    make_entry("kube-controller-manager", "Update", {"f:status": {}}, subresource="status"),
    make_entry(STATUS_MANAGER, "Apply", {"f:status": {}}, subresource="status"),
]


def test_a_create_is_renamed() -> None:
    created = make_entry(MANAGER, "Update", {"f:spec": {"f:a": {}}})
    assert is_create_note(created)
    assert adopt_fields([*OTHERS, created]) == [{**created, "operation": "Apply"}, *OTHERS]


def test_fields_that_were_applied_already_are_joined() -> None:
    created = make_entry(MANAGER, "Update", {"f:spec": {"f:a": {}, "f:list": {'k:{"name":"x"}': {".": {}}}}})
    applied = make_entry(MANAGER, "Apply", {"f:spec": {"f:b": {}, "f:list": {'k:{"name":"y"}': {".": {}}}}})
    adopted = adopt_fields([created, applied, *OTHERS])
    assert adopted is not None
    assert adopted[1:] == OTHERS
    fields = adopted[0]["fieldsV1"]["f:spec"]
    assert fields == {
        "f:a": {},
        "f:b": {},
        "f:list": {'k:{"name":"x"}': {".": {}}, 'k:{"name":"y"}': {".": {}}},
    }


def test_without_a_create_there_is_nothing_to_do() -> None:
    assert adopt_fields(OTHERS) is None
    assert adopt_fields([make_entry(MANAGER, "Apply", {})]) is None
    assert not is_create_note(make_entry(MANAGER, "Update", {}, subresource="scale"))
