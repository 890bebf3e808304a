"""Every bound of the CRD holds on the real API server: the bound itself passes, one step beyond is refused.

The cases come from the schema; the objects are the full pools, changed in one place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from tests.cluster.crd.conftest import Answer, Judge
from tests.cluster.crd.schema import ROOT, SPEC, Schema, walk_all
from tests.support.pools import (
    Manifest,
    changed,
    make_full_pool,
    make_pool,
    make_scaled_pool,
    make_split_pool,
)

pytestmark = pytest.mark.cluster

FULL, SCALED, SPLIT = make_full_pool(), make_scaled_pool(), make_split_pool()
CLAIMED = changed(
    make_pool(model={"source": "hf://o/r"}), "spec.model.cache", {"type": "Claim", "claimName": "weights"}
)
# What the server says about a schema bound; the words of CEL rules differ.
BOUND_WORDS = re.compile(
    "should be (greater|less) than or equal|may not be (more|longer) than|Too (long|many|few)|must have at (most|least)"
    "|should be at least|should have at (least|most)|Unsupported value|must be of type"
)
# Where a shared schema stands more than once, one place is enough: the anchors make the others the same text.
ALIKE = (
    "spec.disaggregation.decode.",
    "spec.disaggregation.prefill.resources",
    "spec.disaggregation.prefill.template",
)
ALIKE_TOO = ("spec.disaggregation.prefill.scaling", "spec.model.adapters[].source", "spec.engine.env[]")


def list_fields() -> list[tuple[str, Schema]]:
    """Fields with something to hold, by schema path such as spec.model.env[].name."""
    found = [(path, schema) for path, schema in walk_all(SPEC, "spec") if list_beyond(schema)]
    return [(path, schema) for path, schema in found if not path.startswith((*ALIKE, *ALIKE_TOO))]


def list_beyond(schema: Schema) -> list[Any]:
    """Values one step outside each bound of a schema."""
    beyond: list[Any] = []
    if "minimum" in schema:
        beyond.append(schema["minimum"] - 1)
    if "maximum" in schema:
        beyond.append(schema["maximum"] + 1)
    if "maxLength" in schema and schema.get("type") == "string":
        beyond.append("a" * (schema["maxLength"] + 1))
    if schema.get("minLength"):
        beyond.append("")
    if "enum" in schema:
        beyond.append("Other" if schema["type"] == "string" else 7)
    if "type" in schema and schema["type"] != "object":
        beyond.append({})
    return beyond


def list_at(schema: Schema) -> list[Any]:
    """Values exactly on the numeric bounds and in the enumeration."""
    return [schema[key] for key in ("minimum", "maximum") if key in schema] + list(schema.get("enum", []))


def base_of(path: str) -> Manifest:
    if path.startswith("spec.disaggregation"):
        return SPLIT
    if path.startswith("spec.scaling"):
        return SCALED
    if path == "spec.model.cache.claimName":
        return CLAIMED
    return FULL


def put(path: str, value: Any) -> Manifest:
    """The base object with a value at a schema path; [] means the first entry of the list or map there."""
    base = base_of(path)
    if path.endswith("[]"):
        parent = path.removesuffix("[]")
        entries = read(base, parent)
        return changed(base, parent, [value] if isinstance(entries, list) else {next(iter(entries)): value})
    return changed(base, path.replace("[]", ".0"), value)


def read(pool: Manifest, path: str) -> Any:
    place: Any = pool
    for part in path.replace("[]", ".0").split("."):
        place = place[int(part)] if isinstance(place, list) else place[part]
    return place


def list_bound_causes(answer: Answer, path: str) -> list[str]:
    """Messages about a schema bound at the field."""
    field = path.removesuffix("[]").replace("[]", "[0]")
    return [c.message for c in answer.causes if c.field.startswith(field) and BOUND_WORDS.search(c.message)]


FIELDS = list_fields()


@pytest.mark.parametrize(("path", "schema"), FIELDS, ids=[path for path, _ in FIELDS])
def test_a_value_beyond_the_bound_is_refused_at_its_field(judge: Judge, path: str, schema: Schema) -> None:
    for value in list_beyond(schema):
        answer = judge.create(put(path, value))
        assert list_bound_causes(answer, path), (value, answer.causes)


@pytest.mark.parametrize(("path", "schema"), FIELDS, ids=[path for path, _ in FIELDS])
def test_a_value_on_the_bound_is_not_refused_by_the_schema(judge: Judge, path: str, schema: Schema) -> None:
    for value in list_at(schema):
        answer = judge.create(put(path, value))
        assert not list_bound_causes(answer, path), (value, answer.causes)


def list_collections() -> list[tuple[str, Schema]]:
    found = [
        (path, schema)
        for path, schema in walk_all(SPEC, "spec")
        if {"maxItems", "maxProperties"} & schema.keys()
    ]
    return [(path, schema) for path, schema in found if not path.startswith((*ALIKE, *ALIKE_TOO))]


COLLECTIONS = list_collections()


@pytest.mark.parametrize(("path", "schema"), COLLECTIONS, ids=[path for path, _ in COLLECTIONS])
def test_a_list_or_map_has_room_to_its_bound_and_no_further(judge: Judge, path: str, schema: Schema) -> None:
    if schema.get("maxProperties") == 1:
        return  # exactly one of the fields: tested by the next function
    entries = read(base_of(path), path)
    most = schema.get("maxItems") or schema["maxProperties"]
    for size, refused in ((most, False), (most + 1, True)):
        answer = judge.create(put(path, grow(entries, schema, size)))
        assert bool(list_bound_causes(answer, path)) is refused, (size, answer.causes)


def grow(entries: Any, schema: Schema, size: int) -> Any:
    """A list or map of a size, made of copies of its first entry under keys of their own."""
    if isinstance(entries, dict):
        value = next(iter(entries.values()))
        return {**entries, **{f"key-{n}": value for n in range(size - len(entries))}}
    key = (schema.get("x-kubernetes-list-map-keys") or [None])[0]
    copies = [entries[0]] * (size - len(entries))
    if key is None:
        return [*entries, *copies]
    return [*entries, *({**entry, key: grow_key(entry[key], n)} for n, entry in enumerate(copies))]


def grow_key(key: str, number: int) -> str:
    return f"{key}{number}"


def test_a_variable_has_exactly_one_origin(judge: Judge) -> None:
    two = {"fieldRef": {"fieldPath": "x"}, "secretKeyRef": {"name": "s", "key": "k"}}
    for origin in ({}, two):
        answer = judge.create(put("spec.model.env[].valueFrom", origin))
        assert [cause for cause in answer.causes if cause.field == "spec.model.env[0].valueFrom"], (
            answer.causes
        )


def test_every_field_has_a_type_a_bound_and_a_description() -> None:
    """No floats; no free object outside the template; no string, list, map or number without a bound."""
    for path, schema in walk_all(ROOT, ""):
        if path.endswith((".metadata", ".apiVersion", ".kind")):
            continue
        complaints = list(list_complaints(path, schema))
        assert complaints == [], path


def list_complaints(path: str, schema: Schema) -> Iterator[str]:
    kind = schema.get("type")
    if kind is None and not schema.get("x-kubernetes-int-or-string"):
        yield "no type"
    if kind == "number":
        yield "a float"
    if not path.endswith("[]") and "description" not in schema:
        yield "no description"
    if kind == "string" and not {"maxLength", "enum"} & schema.keys() and schema.get("format") != "date-time":
        yield "a string without a bound"
    if (
        kind == "integer"
        and not {"minimum", "enum"} <= schema.keys()
        and "minimum" not in schema
        and "enum" not in schema
    ):
        yield "a number without a bound"
    if kind == "integer" and "format" not in schema:
        yield "a number without a format"
    if kind == "array" and not {"maxItems", "x-kubernetes-list-type"} <= schema.keys():
        yield "a list without a bound or a merge rule"
    if "additionalProperties" in schema and "maxProperties" not in schema:
        yield "a map without a bound"
    if schema.get("x-kubernetes-preserve-unknown-fields") and ".template" not in path:
        yield "free content outside the template"


def test_spec_numbers_have_both_ends() -> None:
    numbers = [(path, schema) for path, schema in walk_all(SPEC, "spec") if schema.get("type") == "integer"]
    assert [
        path
        for path, schema in numbers
        if "enum" not in schema and not {"minimum", "maximum"} <= schema.keys()
    ] == []


def test_no_refusal_shows_a_pattern() -> None:
    """A rule's message says what to write; of a pattern the API server shows the regular expression."""
    assert [path for path, schema in walk_all(SPEC, "spec") if "pattern" in schema] == []


def test_op_072_the_crd_file_is_plain_yaml() -> None:
    from tests.cluster.crd.schema import CRD, CRD_FILE

    assert CRD["kind"] == "CustomResourceDefinition"
    assert "{{" not in CRD_FILE.read_text(encoding="utf-8")
