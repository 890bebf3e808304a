"""Whether a live object still is what the operator applied.

The live object has more fields than the manifest (defaults, other managers' fields), so the question is containment,
not equality. Numbers written in two ways ("0.5" and "500m") are equal.
"""

from __future__ import annotations

from typing import Any

from millpond_operator.api.errors import QuantityError
from millpond_operator.api.quantity import parse_quantity
from millpond_operator.desired.manifest import Manifest
from millpond_operator.plan.snapshot import Child

KEYS = ("name", "mountPath", "containerPort", "uid", "topologyKey", "key")
"""What identifies an item of a list of maps, most specific first."""


def has_drifted(manifest: Manifest, live: Child) -> bool:
    """Whether the child must be applied again: the wish changed, or somebody changed the child."""
    return live.digest != manifest.digest or find_difference(manifest.body, live.body) is not None


def find_difference(wanted: Any, live: Any, path: str = "") -> str | None:
    """Path of the first wanted value that the live object does not hold; None when it holds all."""
    if wanted == live:
        return None
    if isinstance(wanted, dict):
        return _compare_maps(wanted, live, path)
    if isinstance(wanted, list):
        return _compare_lists(wanted, live, path)
    return None if _is_equal(wanted, live) else path


def _compare_maps(wanted: dict[str, Any], live: Any, path: str) -> str | None:
    if not isinstance(live, dict):
        return None if not wanted and live is None else path
    for key, value in wanted.items():
        found = find_difference(value, live.get(key), f"{path}.{key}")
        if found is not None:
            return found
    return None


def _compare_lists(wanted: list[Any], live: Any, path: str) -> str | None:
    if not wanted:
        return None
    if not isinstance(live, list):
        return path
    if all(isinstance(item, dict) for item in wanted):
        return _compare_items(wanted, [item for item in live if isinstance(item, dict)], path)
    if len(wanted) != len(live):
        return path
    for index, (item, other) in enumerate(zip(wanted, live, strict=True)):
        found = find_difference(item, other, f"{path}[{index}]")
        if found is not None:
            return found
    return None


def _compare_items(wanted: list[dict[str, Any]], live: list[dict[str, Any]], path: str) -> str | None:
    """Each wanted map has to be in a live one: of its key, or, where no key tells them apart, in any of its own."""
    key = _find_key(wanted)
    if key is None and len(wanted) != len(live):
        return path
    left = list(live)
    for index, item in enumerate(wanted):
        candidates = left if key is None else [other for other in live if other.get(key) == item[key]]
        found = [find_difference(item, other, f"{path}[{index}]") for other in candidates]
        if None not in found:
            return found[0] if len(found) == 1 else f"{path}[{index}]"
        left = [other for other in left if other is not candidates[found.index(None)]]
    return None


def _find_key(items: list[dict[str, Any]]) -> str | None:
    """What tells the items apart: one volume may be mounted twice, and one taint be tolerated with two effects."""
    return next((k for k in KEYS if len({str(item[k]) for item in items if k in item}) == len(items)), None)


def _is_equal(wanted: Any, live: Any) -> bool:
    if wanted == live:
        return True
    # The API server leaves out fields that hold their zero value.
    if live is None:
        return wanted in ("", 0, False)
    if isinstance(wanted, bool) or isinstance(live, bool):
        return False
    try:
        return parse_quantity(wanted) == parse_quantity(live)
    except (QuantityError, TypeError):
        return False
