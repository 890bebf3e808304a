"""Walk the schema of the CRD file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Schema = dict[str, Any]
CRD_FILE = Path(__file__).resolve().parents[3] / "crds" / "inferencepools.millpond.dev.yaml"
CRD: Schema = yaml.safe_load(CRD_FILE.read_text(encoding="utf-8"))
ROOT: Schema = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
SPEC: Schema = ROOT["properties"]["spec"]
STATUS: Schema = ROOT["properties"]["status"]


def walk(schema: Schema, path: str = "spec") -> Iterator[tuple[str, Schema]]:
    """Every field with its dotted path; entries of lists and maps share the path of the list or map."""
    yield path, schema
    for name, below in schema.get("properties", {}).items():
        yield from walk(below, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            inner = walk(schema[key], path)
            next(inner)
            yield from inner


def walk_all(schema: Schema, path: str) -> Iterator[tuple[str, Schema]]:
    """Like `walk`, with the schemas of entries too, as path[]."""
    yield path, schema
    for name, below in schema.get("properties", {}).items():
        yield from walk_all(below, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from walk_all(schema[key], f"{path}[]")
