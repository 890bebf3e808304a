"""Whether the Secrets and claims that a pool names exist: those its pods need, only while the pool is not settled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from millpond_operator.clients.kube import KubeClient
from millpond_operator.desired.kinds import Kind
from millpond_operator.errors import ForbiddenError, NotFoundError

Clock = Callable[[], float]
Found = Literal["There", "Missing", "Forbidden"]
KEEP_SECONDS = 10.0


class ReferenceChecker:
    """Looks single objects up by name, metadata only, and keeps each answer for a few seconds."""

    def __init__(self, kube: KubeClient, clock: Clock) -> None:
        self._kube = kube
        self._clock = clock
        self._known: dict[tuple[str, str, str], tuple[float, Found]] = {}

    async def list_missing(self, kind: Kind, namespace: str, names: Iterable[str]) -> tuple[str, ...]:
        """Names that do not exist. What the operator may not look at counts as existing: the kubelet will tell."""
        return tuple([name for name in names if await self.look(kind, namespace, name) == "Missing"])

    async def list_forbidden(self, kind: Kind, namespace: str, names: Iterable[str]) -> tuple[str, ...]:
        """Names that the operator may not look at."""
        return tuple([name for name in names if await self.look(kind, namespace, name) == "Forbidden"])

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
