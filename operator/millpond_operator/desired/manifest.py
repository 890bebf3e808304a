"""A child as the operator wants it: exactly the fields it owns, and their digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millpond_common.contract import labels
from millpond_operator.desired.kinds import POOL, Kind

Content = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Owner:
    """The pool that a child belongs to."""

    namespace: str
    name: str
    uid: str

    def make_reference(self, *, controller: bool) -> dict[str, Any]:
        """Owner reference of a child; a gateway has several pools and no controller."""
        reference = {"apiVersion": POOL.api_version, "kind": POOL.name, "name": self.name, "uid": self.uid}
        return reference | ({"controller": True, "blockOwnerDeletion": True} if controller else {})


@dataclass(frozen=True, slots=True)
class Manifest:
    """One object to apply."""

    kind: Kind
    namespace: str
    name: str
    body: Content
    digest: str


def make_manifest(
    kind: Kind,
    namespace: str,
    name: str,
    *,
    own_labels: Mapping[str, str],
    owners: list[dict[str, Any]],
    content: Content,
) -> Manifest:
    """Put metadata around the content and note the digest of the whole in an annotation."""
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": namespace,
        "labels": dict(own_labels),
        "ownerReferences": owners,
    }
    body = {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata, **content}
    digest = compute_digest(body)
    metadata["annotations"] = {labels.APPLIED_DIGEST: digest}
    return Manifest(kind, namespace, name, body, digest)


def compute_digest(value: object) -> str:
    """Sixteen hexadecimal digits of the SHA-256 of the canonical JSON."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
