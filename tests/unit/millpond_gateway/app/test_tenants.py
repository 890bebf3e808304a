from __future__ import annotations

import base64

from millpond_common.contract.openai import ApiError, ErrorCode
from millpond_gateway.app.tenants import KeyRing, check_tenant
from millpond_gateway.world.records import PoolTenant, PoolView
from millpond_gateway.world.secrets import parse_keys

OPEN = PoolView(name="open", model="open")
CLOSED = PoolView(name="closed", model="closed", tenants=(PoolTenant(name="acme", key_secret="acme-keys"),))


def code(answer: str | ApiError | None) -> ErrorCode | None:
    return answer.code if isinstance(answer, ApiError) else None


def test_a_key_names_its_tenant_and_an_unknown_one_is_refused() -> None:
    ring = KeyRing()
    assert ring.identify(b"Bearer whatever") == ""  # no keys are known: the header is the engine's
    ring.replace({"acme": [b"k1", b"k2"], "other": [b"k3", b""]})
    assert ring.identify(b"Bearer k1") == "acme"
    assert ring.identify(b"bearer  k3 ") == "other"
    assert ring.identify(None) == ""
    assert code(ring.identify(b"Bearer k4")) is ErrorCode.INVALID_API_KEY
    assert code(ring.identify(b"Bearer ")) is ErrorCode.INVALID_API_KEY
    assert code(ring.identify(b"Basic k1")) is ErrorCode.INVALID_API_KEY
    ring.replace({"other": [b"k3"]})
    assert code(ring.identify(b"Bearer k1")) is ErrorCode.INVALID_API_KEY


def test_a_pool_with_keys_admits_only_its_own_tenants() -> None:
    assert check_tenant(OPEN, "") is None
    assert check_tenant(OPEN, "anyone") is None
    assert check_tenant(CLOSED, "acme") is None
    assert code(check_tenant(CLOSED, "")) is ErrorCode.INVALID_API_KEY
    assert code(check_tenant(CLOSED, "other")) is ErrorCode.PERMISSION_DENIED


def test_a_secret_holds_one_key_a_line_under_any_name() -> None:
    data = {
        "a": base64.b64encode(b"k1\n\n k2 \n").decode(),
        "b": base64.b64encode(b"k3").decode(),
        "c": "%%%",
    }
    assert sorted(parse_keys({"data": data})) == [b"k1", b"k2", b"k3"]
    assert parse_keys({}) == []
