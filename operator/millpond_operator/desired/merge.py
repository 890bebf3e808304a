"""Strategic merge of pod templates: maps merge, lists of named things merge by their key, other lists are replaced.

The rules of Kubernetes' strategic merge patch for the fields that a pool's template may hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MERGE_KEYS = {
    "volumes": "name",
    "volumeMounts": "mountPath",
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "resourceClaims": "name",
    "imagePullSecrets": "name",
}
"""List fields that merge by key; every other list is replaced as a whole."""


def merge(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """The base with the patch over it; a null in the patch removes the field."""
    merged = dict(base)
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merge_value(name, merged.get(name), value)
    return merged


def _merge_value(name: str, old: Any, new: Any) -> Any:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return merge(old, new)
    if isinstance(old, list) and isinstance(new, list) and name in MERGE_KEYS:
        return _merge_list(old, new, MERGE_KEYS[name])
    return new


def _merge_list(old: list[Any], new: list[Any], key: str) -> list[Any]:
    patches = {item[key]: item for item in new}
    merged = [merge(item, patches.pop(item[key])) if item[key] in patches else item for item in old]
    return merged + [item for item in new if item[key] in patches]
