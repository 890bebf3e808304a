"""The Secret with the gateways' key: written once by server-side apply, then only its metadata.

An apply names its object, so a role can allow this one Secret and no other; a create cannot be allowed by name. Nothing here
reads the key back.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping
from typing import Any

from millpond_common.contract.gateway_peers import ENTRY
from millpond_common.contract.labels import MANAGER
from millpond_operator.clients.kube import KubeClient
from millpond_operator.desired.manifest import Manifest
from millpond_operator.errors import ConflictError, NotFoundError

_KEY_BYTES = 32


async def create_secret(kube: KubeClient, manifest: Manifest) -> Mapping[str, Any] | None:
    """Make the Secret with a new key, and return its metadata; None when it has one already.

    A manager of its own and no force: of two that write at once one is refused, instead of replacing the other's key.
    """
    key = base64.b64encode(secrets.token_hex(_KEY_BYTES).encode()).decode()
    manager = f"{MANAGER}-{secrets.token_hex(4)}"
    body = {**manifest.body, "data": {ENTRY: key}}
    try:
        answer = await kube.apply(
            manifest.kind, manifest.namespace, manifest.name, body, manager=manager, force=False
        )
    except ConflictError:
        return None
    return _strip(answer)


async def find_secret(kube: KubeClient, manifest: Manifest) -> Mapping[str, Any] | None:
    """Metadata of what has the name."""
    try:
        return await kube.get_metadata(manifest.kind, manifest.namespace, manifest.name)
    except NotFoundError:
        return None


async def mend_secret(kube: KubeClient, manifest: Manifest, *, uid: str | None) -> Mapping[str, Any]:
    """Write the metadata, owners above all; the key stays as it is, whoever wrote it."""
    wanted = manifest.body["metadata"]
    metadata = {part: wanted[part] for part in ("labels", "annotations", "ownerReferences")}
    metadata |= {"uid": uid} if uid is not None else {}
    answer = await kube.merge(
        manifest.kind, manifest.namespace, manifest.name, {"metadata": metadata}, manager=MANAGER
    )
    return _strip(answer)


def _strip(secret: Mapping[str, Any]) -> Mapping[str, Any]:
    """The answer to a write holds the key: it goes no further."""
    return {"metadata": secret["metadata"]}
