from __future__ import annotations

import pytest

from millpond_gateway.world.static import StaticError, parse_static


def test_a_flag_names_a_pool_and_its_replicas() -> None:
    pool, replicas = parse_static("m=http://127.0.0.1:1,http://[::1]:2,host")
    assert pool.model == "m"
    assert [replica.address for replica in replicas] == ["127.0.0.1:1", "[::1]:2", "host:80"]
    assert all(replica.static for replica in replicas)


def test_an_address_may_have_a_path_in_front_of_the_engine_s_own() -> None:
    _, replicas = parse_static("m=http://a:1/x,http://a:1/x/y/v1,http://a:1/v1/,http://b/%7Ex/")
    assert [(replica.address, replica.prefix) for replica in replicas] == [
        ("a:1", "/x"),
        ("a:1", "/x/y"),
        ("a:1", ""),
        ("b:80", "/%7Ex"),
    ]
    assert len({replica.uid for replica in replicas}) == 4


@pytest.mark.parametrize(
    "flag",
    [
        "",
        "m",
        "m=",
        "=http://a",
        "m=https://a",
        "m=http://a,http://a",
        "m=http://a/p,http://a/p/v1/",
        "m=http://user@a",
        "m=http://a/p#q",
        "m=http://a/p q",
        "m=http://a//p",
        "m=http://a/%C3%A4/\u00e4",
    ],
)
def test_another_form_is_refused(flag: str) -> None:
    with pytest.raises(StaticError):
        parse_static(flag)
