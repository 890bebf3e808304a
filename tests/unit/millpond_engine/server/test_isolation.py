"""Caches of tenants: one never sees, hits or names another's."""

from __future__ import annotations

from tests.support.engine_server import Running

from millpond_common.contract import headers

PROMPT = "confidential " * 20


async def count_cached(engine: Running, tenant: str, /, **body: object) -> int:
    status, answer = await engine.post(
        "/v1/completions", {"prompt": PROMPT, "max_tokens": 1, **body}, **{headers.TENANT: tenant}
    )
    assert status == 200, answer
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_eng_023_a_tenant_never_hits_another_tenants_prefix(engine: Running) -> None:
    assert await count_cached(engine, "a") == 0
    assert await count_cached(engine, "b") == 0
    assert await count_cached(engine, "a") > 0


async def test_eng_024_a_salt_narrows_and_never_replaces_the_namespace(engine: Running) -> None:
    assert await count_cached(engine, "a", cache_salt="s") == 0
    assert await count_cached(engine, "b", cache_salt="s") == 0
    assert await count_cached(engine, "b", cache_salt="a") == 0
    assert await count_cached(engine, "a") == 0
    assert await count_cached(engine, "a", cache_salt="s") > 0


async def test_no_tenant_is_a_namespace_of_its_own(engine: Running) -> None:
    assert await count_cached(engine, "a") == 0
    assert await count_cached(engine, "") == 0
    assert await count_cached(engine, "", cache_salt="a") == 0
    assert await count_cached(engine, "") > 0


async def test_a_body_cannot_name_class_or_tenant(engine: Running) -> None:
    assert await count_cached(engine, "a", tenant="b") == 0
    assert await count_cached(engine, "b") == 0
