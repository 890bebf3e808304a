"""The revision of a role: a hash of everything in the spec that shapes an engine pod.

Only what users wrote counts, and only where it differs from the default. So neither an operator upgrade (new
images, a new probe) nor a new optional field of the API changes a revision, and no pool rolls without its
owner's doing. Counts, scaling, gateway and prices are left out: changing them rolls nothing.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from msgspec import NODEFAULT

from millpond_operator.api.pool import InferencePool, RoleView
from millpond_operator.desired.manifest import compute_digest

SCHEME = 1
"""Raise it only to roll every pool on purpose."""


def compute_revision(pool: InferencePool, role: RoleView) -> str:
    """Ten hexadecimal digits; equal inputs give equal revisions in every release."""
    return compute_digest(list_inputs(pool, role))[:10]


def list_inputs(pool: InferencePool, role: RoleView) -> dict[str, Any]:
    """What the revision is computed from, as plain data without defaults."""
    spec = pool.spec
    scheduling = msgspec.structs.replace(
        spec.scheduling, pricing=None, tenants=_drop_keys(spec.scheduling.tenants)
    )
    return {
        "scheme": SCHEME,
        "role": role.role,
        "modelName": pool.model_name,
        "model": strip_defaults(msgspec.structs.replace(spec.model, name=None)),
        "engine": strip_defaults(spec.engine),
        "resources": strip_defaults(role.resources),
        "scheduling": strip_defaults(scheduling),
        "drainSeconds": spec.rollout.drain_seconds,
        "templates": [strip_defaults(template) for template in role.templates],
    }


def _drop_keys(tenants: tuple[Any, ...]) -> tuple[Any, ...]:
    """API keys and the limit of tokens per minute are the gateway's business."""
    return tuple(
        msgspec.structs.replace(tenant, api_key_secret_ref=None, tokens_per_minute=None) for tenant in tenants
    )


def strip_defaults(value: Any) -> Any:
    """Plain data of a record without the fields that hold their default."""
    if isinstance(value, msgspec.Struct):
        kept = {}
        for field in _list_fields(type(value)):
            own = getattr(value, field.name)
            if own != _get_default(field):
                kept[field.encode_name] = strip_defaults(own)
        return kept
    if isinstance(value, tuple | list):
        return [strip_defaults(item) for item in value]
    if isinstance(value, dict):
        return {key: strip_defaults(item) for key, item in value.items()}
    return value


@cache
def _list_fields(record: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(record)


def _get_default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default_factory is not NODEFAULT:
        return field.default_factory()
    return field.default
