"""The typed view repeats the CRD: same fields, same defaults, same enumerations, same bounds where it cuts."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from millpond_common.contract.reasons import ConditionReason, ConditionType
from millpond_operator.api.spec import PoolSpec, TemplateMetadata
from millpond_operator.api.status import MAX_DRAINING, MAX_MESSAGE_LENGTH, PoolStatus

ROOT = Path(__file__).resolve().parents[4]
CRD = yaml.safe_load((ROOT / "crds" / "inferencepools.millpond.dev.yaml").read_text(encoding="utf-8"))
SCHEMA = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def strip_optional(annotation: Any) -> Any:
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        kept = [part for part in typing.get_args(annotation) if part is not type(None)]
        return kept[0] if len(kept) == 1 else annotation
    return annotation


def struct_of(annotation: Any) -> type[msgspec.Struct] | None:
    """The record inside an annotation such as `X`, `X | None` or `tuple[X, ...]`."""
    plain = strip_optional(annotation)
    if typing.get_origin(plain) is tuple:
        plain = typing.get_args(plain)[0]
    return plain if isinstance(plain, type) and issubclass(plain, msgspec.Struct) else None


def walk(struct: type[msgspec.Struct], schema: dict[str, Any], path: str) -> Iterator[tuple[str, Any, Any]]:
    """Every record of the view with the object schema it mirrors."""
    yield path, struct, schema
    hints = typing.get_type_hints(struct)
    for field in msgspec.structs.fields(struct):
        inner = struct_of(hints[field.name])
        below = schema["properties"].get(field.encode_name)
        if inner is not None and below is not None:
            yield from walk(inner, below.get("items", below), f"{path}.{field.encode_name}")


PAIRS = [
    *walk(PoolSpec, SCHEMA["properties"]["spec"], "spec"),
    *walk(PoolStatus, SCHEMA["properties"]["status"], "status"),
]
IDS = [path for path, _, _ in PAIRS]


@pytest.mark.parametrize(("path", "struct", "schema"), PAIRS, ids=IDS)
def test_the_view_has_exactly_the_fields_of_the_crd(path: str, struct: Any, schema: dict[str, Any]) -> None:
    assert {field.encode_name for field in msgspec.structs.fields(struct)} == set(schema["properties"]), path


@pytest.mark.parametrize(("path", "struct", "schema"), PAIRS, ids=IDS)
def test_the_view_requires_what_the_crd_requires(path: str, struct: Any, schema: dict[str, Any]) -> None:
    required = {field.encode_name for field in msgspec.structs.fields(struct) if field.required}
    assert required == set(schema.get("required", [])), path


@pytest.mark.parametrize(("path", "struct", "schema"), PAIRS, ids=IDS)
def test_the_view_defaults_as_the_crd_does(path: str, struct: Any, schema: dict[str, Any]) -> None:
    hints = typing.get_type_hints(struct)
    for field in msgspec.structs.fields(struct):
        if field.required:
            continue
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        stated = schema["properties"][field.encode_name].get("default", msgspec.UNSET)
        if stated is msgspec.UNSET:
            # Nothing in the CRD: absent here too, or a record of which every field is absent.
            assert default in (None, (), {}) or default == struct_of(hints[field.name])(), (
                f"{path}.{field.encode_name}"
            )
        else:
            assert default == msgspec.convert(stated, hints[field.name]), f"{path}.{field.encode_name}"


@pytest.mark.parametrize(("path", "struct", "schema"), PAIRS, ids=IDS)
def test_the_view_lists_the_enumerations_of_the_crd(path: str, struct: Any, schema: dict[str, Any]) -> None:
    hints = typing.get_type_hints(struct)
    for field in msgspec.structs.fields(struct):
        plain = strip_optional(hints[field.name])
        known = list(typing.get_args(plain)) if typing.get_origin(plain) is typing.Literal else None
        assert known == schema["properties"][field.encode_name].get("enum"), f"{path}.{field.encode_name}"


def test_the_walk_reached_the_deepest_records() -> None:
    assert {"spec.scheduling.classes.admitWhileQueued", "spec.disaggregation.decode.scaling.targets"} <= set(
        IDS
    )
    assert TemplateMetadata in [struct for _, struct, _ in PAIRS]


def test_bounds_the_view_cuts_to_are_those_of_the_crd() -> None:
    status = SCHEMA["properties"]["status"]["properties"]
    assert status["conditions"]["items"]["properties"]["message"]["maxLength"] == MAX_MESSAGE_LENGTH
    assert status["draining"]["maxItems"] == MAX_DRAINING


def test_every_condition_type_and_reason_fits_the_crd() -> None:
    conditions = SCHEMA["properties"]["status"]["properties"]["conditions"]
    assert len(ConditionType) <= conditions["maxItems"]
    for value in [*ConditionType, *ConditionReason]:
        assert value.isalnum()
        assert len(value) <= 64
