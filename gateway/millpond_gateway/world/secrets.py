"""API keys of tenants from Secrets, read by name: the gateway may not list them.

Read again every minute, so that a rotated key is known, and a withdrawn one refused, within that time. A Secret
that cannot be read leaves its tenant without keys: closed, never open.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable, Mapping
from typing import Any

import httpx2
import structlog
from lightkube.core.exceptions import ConfigError

_log = structlog.get_logger("world")
_LOOK_SECONDS = 1.0
_READ_SECONDS = 60.0
_RETRY_SECONDS = 5.0

Keys = dict[str, list[bytes]]
"""Keys by tenant."""


class SecretReader:
    """Keeps the keys of every tenant that names a Secret."""

    def __init__(
        self,
        client: httpx2.AsyncClient,
        namespace: str,
        *,
        wanted: Callable[[], Mapping[str, str]],
        deliver: Callable[[Keys], None],
    ) -> None:
        self._client = client
        self._path = f"/api/v1/namespaces/{namespace}/secrets"
        self._wanted = wanted
        self._deliver = deliver

    async def run(self) -> None:
        """Read what pools name, again and again, until cancelled."""
        loop = asyncio.get_running_loop()
        known: dict[str, str] = {}
        due = loop.time()
        while True:
            wanted = dict(self._wanted())
            if wanted != known or (wanted and loop.time() >= due):
                keys, complete = await self._read_all(wanted)
                self._deliver(keys)
                known = wanted
                due = loop.time() + (_READ_SECONDS if complete else _RETRY_SECONDS)
            await asyncio.sleep(_LOOK_SECONDS)

    async def _read_all(self, wanted: Mapping[str, str]) -> tuple[Keys, bool]:
        keys: Keys = {}
        for tenant, name in wanted.items():
            try:
                answer = await self._client.get(f"{self._path}/{name}")
                if answer.status_code != 200:
                    _log.warning("secret of API keys not readable", secret=name, status=answer.status_code)
                    continue
                keys[tenant] = parse_keys(answer.json())
            except (httpx2.HTTPError, ConfigError, ValueError) as error:
                _log.warning("secret of API keys not readable", secret=name, error=type(error).__name__)
        return keys, len(keys) == len(wanted)


def parse_keys(secret: Mapping[str, Any]) -> list[bytes]:
    """Every value of a Secret, one key a line; blank lines are no keys."""
    keys: list[bytes] = []
    for value in (secret.get("data") or {}).values():
        try:
            lines = base64.b64decode(value).splitlines()
        except (binascii.Error, ValueError):
            continue
        keys += [line.strip() for line in lines if line.strip()]
    return keys
