"""What a pool may refer to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

CRD = Path(__file__).resolve().parents[3] / "crds" / "inferencepools.millpond.dev.yaml"


def find_paths(schema: dict[str, Any], name: str, path: str = "spec") -> list[str]:
    """Paths of all fields of a name below a schema."""
    found = [f"{path}.{field}" for field in schema.get("properties") or {} if field == name]
    for field, below in (schema.get("properties") or {}).items():
        found += find_paths(below, name, f"{path}.{field}")
    return found + (
        find_paths(schema["items"], name, f"{path}[]") if isinstance(schema.get("items"), dict) else []
    )


def test_op_088_no_field_can_name_another_namespace() -> None:
    """What cannot be written needs no grant, no condition and no retry: references stay in the pool's namespace."""
    crd = yaml.safe_load(CRD.read_text(encoding="utf-8"))
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert find_paths(spec, "namespace") == []
    assert find_paths(spec, "name"), "the walk finds fields at all"
