from __future__ import annotations

import base64

from millpond_common.contract.openai import ApiError, ErrorCode
from millpond_gateway.app.tenants import KeyRing, find_tenant
from millpond_gateway.proxy.dispatch import Caller
from millpond_gateway.world.records import PoolTenant, PoolView
from millpond_gateway.world.secrets import parse_keys

OPEN = PoolView(name="open", model="open")
CLOSED = PoolView(name="closed", model="closed", tenants=(PoolTenant(name="acme", key_secret="acme-keys"),))


def code(answer: str | ApiError | None) -> ErrorCode | None:
    return answer.code if isinstance(answer, ApiError) else None


def make_ring(**keys: list[bytes]) -> KeyRing:
    ring = KeyRing()
    ring.follow((OPEN, CLOSED))
    ring.replace({name.replace("_", "-"): values for name, values in keys.items()})
    return ring


def test_a_key_names_its_tenant_and_an_unknown_one_is_refused_where_one_is_asked_for() -> None:
    ring = make_ring(acme_keys=[b"k1", b"k2"], other=[b"k3", b""])
    for known in (b"Bearer k1", b"bearer  k2 ", b"BEARER k1"):
        assert find_tenant(CLOSED, ring.identify(known)) == "acme"
    for unknown in (b"Bearer k4", b"Bearer ", b"Basic k1", b"k1", b"Bearerk1", b"Bearer k1 k2", b""):
        caller = ring.identify(unknown)
        assert code(find_tenant(CLOSED, caller)) is ErrorCode.INVALID_API_KEY, unknown
        assert find_tenant(OPEN, caller) == ""
    assert code(find_tenant(CLOSED, ring.identify(b"Bearer k3"))) is ErrorCode.PERMISSION_DENIED
    assert code(find_tenant(CLOSED, ring.identify(None))) is ErrorCode.INVALID_API_KEY
    ring.replace({"other": [b"k3"]})
    assert code(find_tenant(CLOSED, ring.identify(b"Bearer k1"))) is ErrorCode.INVALID_API_KEY


def test_a_key_is_that_of_the_tenant_whose_secret_holds_it_in_this_pool() -> None:
    gold = PoolView(name="a", model="a", tenants=(PoolTenant(name="gold", key_secret="acme-keys"),))
    mine = PoolView(name="b", model="b", tenants=(PoolTenant(name="acme", key_secret="my-keys"),))
    ring = make_ring(acme_keys=[b"k1"], my_keys=[b"k2"])
    first, second = ring.identify(b"Bearer k1"), ring.identify(b"Bearer k2")
    assert [find_tenant(pool, first) for pool in (gold, CLOSED)] == ["gold", "acme"]
    assert code(find_tenant(mine, first)) is ErrorCode.PERMISSION_DENIED, (
        "a tenant's name alone opens nothing"
    )
    assert find_tenant(mine, second) == "acme"
    assert code(find_tenant(CLOSED, second)) is ErrorCode.PERMISSION_DENIED


def test_without_any_key_the_header_is_the_engine_s() -> None:
    ring = make_ring()
    caller = ring.identify(b"Bearer whatever")
    assert not caller.keyed
    assert ring.identify(b"Bearer another") is caller, "nothing is hashed or made for each request"
    assert find_tenant(OPEN, caller) == ""
    assert code(find_tenant(CLOSED, caller)) is ErrorCode.INVALID_API_KEY
    assert make_ring(acme_keys=[b"k1"]).identify(b"Bearer whatever").keyed
    assert find_tenant(OPEN, Caller()) == ""


def test_a_secret_holds_one_key_a_line_under_any_name() -> None:
    data = {
        "a": base64.b64encode(b"k1\n\n k2 \n").decode(),
        "b": base64.b64encode(b"k3").decode(),
        "c": "%%%",
    }
    assert sorted(parse_keys({"data": data})) == [b"k1", b"k2", b"k3"]
    assert parse_keys({}) == []
