"""Reading Secrets of API keys: what an answer says about a Secret counts, what says nothing changes nothing."""

from __future__ import annotations

import asyncio
import base64
import contextlib

import httpx2
import pytest

from millpond_gateway.world import secrets
from millpond_gateway.world.secrets import Keys, SecretReader

KEY = {"data": {"laptop": base64.b64encode(b"k1").decode()}}


class Cluster:
    """An API server with one Secret, which may refuse, fail or be gone."""

    def __init__(self) -> None:
        self.answer: tuple[int, object] | Exception = (200, KEY)
        self.num_asked = 0

    def handle(self, request: httpx2.Request) -> httpx2.Response:
        assert request.url.path == "/api/v1/namespaces/ns/secrets/acme-keys"
        self.num_asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        status, body = self.answer
        return httpx2.Response(status, json=body)


async def test_a_secret_that_is_gone_closes_and_an_api_server_that_is_ill_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_LOOK_SECONDS", "_READ_SECONDS", "_RETRY_SECONDS"):
        monkeypatch.setattr(secrets, name, 0.01)
    cluster = Cluster()
    delivered: list[Keys] = []
    async with httpx2.AsyncClient(
        transport=httpx2.MockTransport(cluster.handle), base_url="http://api"
    ) as client:
        reader = SecretReader(client, "ns", wanted=lambda: {"acme-keys"}, deliver=delivered.append)
        task = asyncio.create_task(reader.run())
        try:
            for answer, known in (
                ((200, KEY), True),
                (httpx2.ConnectError("refused"), True),
                ((500, {}), True),
                ((429, {}), True),
                ((200, "no Secret"), True),
                ((404, {}), False),
                ((503, {}), False),
                ((200, KEY), True),
                ((403, {}), False),
            ):
                cluster.answer = answer
                seen, asked = len(delivered), cluster.num_asked
                async with asyncio.timeout(10):
                    while cluster.num_asked < asked + 2 or len(delivered) < seen + 2:
                        await asyncio.sleep(0.005)
                assert delivered[-1] == ({"acme-keys": [b"k1"]} if known else {}), answer
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
