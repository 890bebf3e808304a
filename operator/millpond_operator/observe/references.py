"""Whether the Secrets and claims that a pool names exist: those its pods need, only while the pool is not settled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import structlog

from millpond_operator.clients.kube import KubeClient
from millpond_operator.desired.kinds import Kind
from millpond_operator.errors import ForbiddenError, NotFoundError

LOG = structlog.get_logger(__name__)
Clock = Callable[[], float]
Found = Literal["There", "Missing", "Forbidden"]
KEEP_SECONDS = 10.0
KEEP_OWN_SECONDS = 60.0
"""What the operator itself made, and only somebody else takes away."""
KEEP_FORBIDDEN_SECONDS = 600.0


class ReferenceChecker:
    """Looks single objects up by name, metadata only, and keeps each answer for a few seconds."""

    def __init__(self, kube: KubeClient, clock: Clock) -> None:
        self._kube = kube
        self._clock = clock
        self._known: dict[tuple[str, str, str], tuple[float, Found]] = {}
        self._own: dict[tuple[str, str, str], tuple[float, Mapping[str, Any] | None]] = {}

    async def list_missing(self, kind: Kind, namespace: str, names: Iterable[str]) -> tuple[str, ...]:
        """Names that do not exist. What the operator may not look at counts as existing: the kubelet will tell."""
        return tuple([name for name in names if await self.look(kind, namespace, name) == "Missing"])

    async def list_forbidden(self, kind: Kind, namespace: str, names: Iterable[str]) -> tuple[str, ...]:
        """Names that the operator may not look at."""
        return tuple([name for name in names if await self.look(kind, namespace, name) == "Forbidden"])

    async def find_own(self, kind: Kind, namespace: str, name: str) -> tuple[bool, Mapping[str, Any] | None]:
        """An object that the operator makes and does not watch: whether it may look, and the metadata, if it exists."""
        key = (kind.plural, namespace, name)
        now = self._clock()
        until, kept = self._own.get(key, (float("-inf"), None))
        if now < until:
            return kept is not None, kept
        try:
            found = await self._kube.get_metadata(kind, namespace, name)
            return True, self.note_own(kind, found)
        except NotFoundError:
            self._own.pop(key, None)  # made in this very round, and then looked for again
            return True, None
        except ForbiddenError:
            self._keep_own(key, None, KEEP_FORBIDDEN_SECONDS)
            LOG.warning(
                "gateways have no key: the operator may not make it",
                namespace=namespace,
                missing=f"get, create, patch and delete on {kind.plural}/{name}",
            )
        return False, None

    def note_own(self, kind: Kind, obj: Mapping[str, Any]) -> Mapping[str, Any]:
        """Keep the metadata of an object that the operator makes, and nothing else of it."""
        metadata = obj["metadata"]
        own = {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata}
        self._keep_own((kind.plural, metadata["namespace"], metadata["name"]), own, KEEP_OWN_SECONDS)
        return own

    def _keep_own(self, key: tuple[str, str, str], own: Mapping[str, Any] | None, seconds: float) -> None:
        now = self._clock()
        self._own = {k: v for k, v in self._own.items() if v[0] > now}
        self._own[key] = (now + seconds, own)

    async def look(self, kind: Kind, namespace: str, name: str) -> Found:
        """Whether an object exists, and may be read by name."""
        key = (kind.plural, namespace, name)
        at, known = self._known.get(key, (float("-inf"), "Missing"))
        if self._clock() - at < KEEP_SECONDS:
            return known
        try:
            await self._kube.get_metadata(kind, namespace, name)
            found: Found = "There"
        except NotFoundError:
            found = "Missing"
        except ForbiddenError:
            found = "Forbidden"
        self._known = {k: v for k, v in self._known.items() if self._clock() - v[0] < KEEP_SECONDS}
        self._known[key] = (self._clock(), found)
        return found
