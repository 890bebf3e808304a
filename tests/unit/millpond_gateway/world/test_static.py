from __future__ import annotations

import pytest

from millpond_gateway.world.static import StaticError, parse_static


def test_a_flag_names_a_pool_and_its_replicas() -> None:
    pool, replicas = parse_static("m=http://127.0.0.1:1,http://[::1]:2,host")
    assert pool.model == "m"
    assert [replica.address for replica in replicas] == ["127.0.0.1:1", "[::1]:2", "host:80"]
    assert all(replica.static for replica in replicas)


@pytest.mark.parametrize(
    "flag", ["", "m", "m=", "=http://a", "m=https://a", "m=http://a/path", "m=http://a,http://a"]
)
def test_another_form_is_refused(flag: str) -> None:
    with pytest.raises(StaticError):
        parse_static(flag)
