"""From created to applied: whose a field is, in the API server's own notes.

A create notes its fields as an update's. An apply by the same manager is another entry, and drops only what an apply
noted before: so a field that a later manifest no longer has would stay for ever. Renaming the entry mends it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from millpond_common.contract.labels import MANAGER

Entry = Mapping[str, Any]
Fields = dict[str, Any]


def is_create_note(entry: Entry) -> bool:
    """Whether an entry of managedFields is what the operator's create left."""
    ours = entry.get("manager") == MANAGER and entry.get("operation") == "Update"
    return ours and not entry.get("subresource")


def adopt_fields(entries: Iterable[Entry]) -> list[Entry] | None:
    """The notes with the create's fields as applied ones; None where there are none."""
    entries = list(entries)
    created = next((entry for entry in entries if is_create_note(entry)), None)
    if created is None:
        return None
    applied = next((e for e in entries if e.get("manager") == MANAGER and e.get("operation") == "Apply"), {})
    fields = unite(applied.get("fieldsV1") or {}, created.get("fieldsV1") or {})
    others = [entry for entry in entries if entry is not created and entry is not applied]
    return [{**created, "operation": "Apply", "fieldsV1": fields}, *others]


def unite(one: Mapping[str, Any], other: Mapping[str, Any]) -> Fields:
    """Fields that are in either of two sets."""
    return {key: unite(one.get(key) or {}, other.get(key) or {}) for key in sorted(one.keys() | other.keys())}
