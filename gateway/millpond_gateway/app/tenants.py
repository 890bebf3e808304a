"""API keys: which tenant a caller belongs to. Keys are kept as digests only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Final

from millpond_common.contract.openai import ApiError, ErrorCode
from millpond_gateway.world.records import PoolView

_BEARER: Final = b"bearer "


class KeyRing:
    """Digests of keys and the tenants they belong to."""

    def __init__(self) -> None:
        self._tenants: dict[bytes, str] = {}

    def replace(self, keys: Mapping[str, Iterable[bytes]]) -> None:
        """All keys, by tenant."""
        self._tenants = {_digest(key): tenant for tenant, values in keys.items() for key in values if key}

    def identify(self, authorization: bytes | None) -> str | ApiError:
        """Tenant of a caller; empty for one without a key. Unknown keys are refused only where keys are known."""
        if not self._tenants or authorization is None:
            return ""
        if authorization[: len(_BEARER)].lower() != _BEARER:
            return ApiError(ErrorCode.INVALID_API_KEY, "write the API key as `Authorization: Bearer KEY`")
        tenant = self._tenants.get(_digest(authorization[len(_BEARER) :].strip()))
        return (
            tenant
            if tenant is not None
            else ApiError(ErrorCode.INVALID_API_KEY, "the API key is not known here")
        )


def check_tenant(pool: PoolView, tenant: str) -> ApiError | None:
    """Whether a tenant may use a pool: one whose tenants have keys admits only them."""
    members = {entry.name for entry in pool.tenants if entry.key_secret is not None}
    if not members or tenant in members:
        return None
    if not tenant:
        return ApiError(
            ErrorCode.INVALID_API_KEY, f"{pool.model} needs an API key: `Authorization: Bearer KEY`"
        )
    return ApiError(ErrorCode.PERMISSION_DENIED, f"this API key does not open {pool.model}")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
