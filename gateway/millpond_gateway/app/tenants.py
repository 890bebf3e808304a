"""API keys: which tenant of a pool a caller is. Keys are kept as digests only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Final

from millpond_common.contract.openai import ApiError, ErrorCode
from millpond_gateway.proxy.dispatch import Caller
from millpond_gateway.world.records import PoolView

_BEARER: Final = b"bearer "
_ANONYMOUS: Final = Caller()
_NO_BEARER: Final = "write the API key as `Authorization: Bearer KEY`"
_UNKNOWN: Final = "the API key is not known here"


class KeyRing:
    """Digests of keys and the Secrets that hold them."""

    def __init__(self) -> None:
        self._secrets: dict[bytes, frozenset[str]] = {}
        self._tenants: dict[str, str] = {}
        self._refuse_others()

    def replace(self, keys: Mapping[str, Iterable[bytes]]) -> None:
        """All keys, by Secret."""
        holders: dict[bytes, set[str]] = {}
        for secret, values in keys.items():
            for key in values:
                if key:
                    holders.setdefault(_digest(key), set()).add(secret)
        self._secrets = {digest: frozenset(secrets) for digest, secrets in holders.items()}
        self._refuse_others()

    def _refuse_others(self) -> None:
        """Make the callers whose key opens nothing, once: clients of open pools send some word as a key with each request."""
        keyed = bool(self._secrets)
        self._malformed = Caller(refusal=ApiError(ErrorCode.INVALID_API_KEY, _NO_BEARER), keyed=keyed)
        self._unknown = Caller(refusal=ApiError(ErrorCode.INVALID_API_KEY, _UNKNOWN), keyed=keyed)

    def follow(self, pools: Iterable[PoolView]) -> None:
        """Which tenant a Secret stands for where a pool asks for no key: the first of all pools by name."""
        entries = ((pool.name, entry.name, entry.key_secret) for pool in pools for entry in pool.tenants)
        named = sorted((pool, name, secret) for pool, name, secret in entries if secret is not None)
        self._tenants = {}
        for _, name, secret in named:
            self._tenants.setdefault(secret, name)

    def identify(self, authorization: bytes | None) -> Caller:
        """Who calls. An unknown key is refused by the pools that ask for one, and means nothing to the others."""
        if authorization is None:
            return _ANONYMOUS
        if authorization[: len(_BEARER)].lower() != _BEARER:
            return self._malformed
        if not self._secrets:
            return self._unknown
        secrets = self._secrets.get(_digest(authorization[len(_BEARER) :].strip()))
        if secrets is None:
            return self._unknown
        tenants = sorted(self._tenants[secret] for secret in secrets if secret in self._tenants)
        return Caller(tenants[0] if tenants else "", secrets=secrets, keyed=True)


def needs_key(pool: PoolView) -> bool:
    """Whether the pool answers only requests with a key of its tenants."""
    return any(entry.key_secret is not None for entry in pool.tenants)


def find_tenant(pool: PoolView, caller: Caller) -> str | ApiError:
    """Which tenant of the pool a caller is; a key is that of the tenant whose Secret holds it, in this pool."""
    if not needs_key(pool):
        return caller.tenant
    for entry in pool.tenants:
        if entry.key_secret is not None and entry.key_secret in caller.secrets:
            return entry.name
    if caller.refusal is not None:
        return caller.refusal
    if not caller.secrets:
        return ApiError(
            ErrorCode.INVALID_API_KEY, f"{pool.model} needs an API key: `Authorization: Bearer KEY`"
        )
    return ApiError(ErrorCode.PERMISSION_DENIED, f"this API key does not open {pool.model}")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
