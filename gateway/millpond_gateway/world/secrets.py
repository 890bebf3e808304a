"""API keys of tenants from Secrets, read by name: the gateway may not list them.

Read again every minute, so that a rotated key is known, and a withdrawn one refused, within that time. A Secret that
is gone or forbidden leaves its tenants without keys: closed, never open. An API server that does not answer says nothing
about a Secret: the keys read before stay good.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import httpx2
import structlog
from lightkube.core.exceptions import ConfigError

_log = structlog.get_logger("world")
_LOOK_SECONDS = 1.0
_READ_SECONDS = 60.0
_RETRY_SECONDS = 5.0

_REFUSALS = frozenset({401, 403, 404})
"""Answers that are about the Secret or the right to read it; every other one may pass."""

Keys = dict[str, list[bytes]]
"""Keys by Secret."""


class SecretReader:
    """Keeps the keys of every Secret that a tenant names."""

    def __init__(
        self,
        client: httpx2.AsyncClient,
        namespace: str,
        *,
        wanted: Callable[[], Iterable[str]],
        deliver: Callable[[Keys], None],
    ) -> None:
        self._client = client
        self._path = f"/api/v1/namespaces/{namespace}/secrets"
        self._wanted = wanted
        self._deliver = deliver
        self._read: Keys = {}
        self._told: dict[str, dict[str, object]] = {}

    async def run(self) -> None:
        """Read what pools name, again and again, until cancelled."""
        loop = asyncio.get_running_loop()
        known: frozenset[str] = frozenset()
        due = loop.time()
        while True:
            wanted = frozenset(self._wanted())
            if wanted != known or (wanted and loop.time() >= due):
                complete = await self._read_all(wanted)
                self._deliver(self._read)
                known = wanted
                due = loop.time() + (_READ_SECONDS if complete else _RETRY_SECONDS)
            await asyncio.sleep(_LOOK_SECONDS)

    async def _read_all(self, wanted: Iterable[str]) -> bool:
        """Read the Secrets again; False when one could not be read."""
        keys: Keys = {}
        complete = True
        for name in sorted(wanted):
            found = await self._read_one(name)
            if isinstance(found, list):
                keys[name] = found
                self._told.pop(name, None)
                continue
            complete = False
            stay = found.get("status") not in _REFUSALS and name in self._read
            if stay:
                keys[name] = self._read[name]
            if self._told.get(name) != found:  # once, not at every try
                _log.warning("secret of API keys not readable", secret=name, keys_stay=stay, **found)
            self._told[name] = found
        self._read = keys
        return complete

    async def _read_one(self, name: str) -> list[bytes] | dict[str, object]:
        """The keys of a Secret, or what is wrong."""
        try:
            answer = await self._client.get(f"{self._path}/{name}")
            return parse_keys(answer.json()) if answer.status_code == 200 else {"status": answer.status_code}
        except (httpx2.HTTPError, ConfigError, ValueError) as error:
            return {"error": type(error).__name__}


def parse_keys(secret: Mapping[str, Any]) -> list[bytes]:
    """Every value of a Secret, one key a line; blank lines are no keys.

    Raises:
        ValueError: it is no Secret.
    """
    if not isinstance(secret, Mapping):
        raise ValueError("a Secret is an object")  # noqa: TRY004 - told like any other answer that is none
    keys: list[bytes] = []
    for value in (secret.get("data") or {}).values():
        try:
            lines = base64.b64decode(value).splitlines()
        except (binascii.Error, ValueError):
            continue
        keys += [line.strip() for line in lines if line.strip()]
    return keys
