"""Expected cached tokens per replica, from the layers of the index."""

from __future__ import annotations

from collections.abc import Sequence

from millpond_gateway.routing.records import EndpointView, PromptKeys
from millpond_gateway.routing.routed import RoutedIndex
from millpond_gateway.routing.settings import RoutingSettings

_AUDIT_DECAY = 0.95


class _Audit:
    __slots__ = ("predicted", "real")

    def __init__(self) -> None:
        self.predicted = 0.0
        self.real = 0.0


class PrefixIndex:
    """What every replica of a pool is expected to hold."""

    def __init__(self, settings: RoutingSettings) -> None:
        self._settings = settings
        self.routed = RoutedIndex(
            max_bytes=settings.index_bytes, speculative_seconds=settings.speculative_seconds
        )
        self._audits: dict[str, _Audit] = {}

    def set_settings(self, settings: RoutingSettings) -> None:
        """Follow changed settings."""
        self._settings = settings

    def predict(self, prompt: PromptKeys, now: float) -> dict[str, int]:
        """Expected cached tokens per replica; absent means none."""
        if not prompt.keys:
            return {}
        matches = self.routed.match(prompt.keys, now)
        limit = max(prompt.num_tokens - 1, 0)
        return {
            uid: min(int(self._ratio(uid) * match.num_blocks * prompt.tokens_per_key), limit)
            for uid, match in matches.items()
        }

    def note_routed(self, endpoint: EndpointView, keys: Sequence[int], now: float) -> None:
        """Enter a routed prompt."""
        if keys:
            capacity = endpoint.num_blocks or self._settings.default_blocks
            self.routed.insert(endpoint.uid, keys, capacity=capacity, now=now)

    def audit(self, uid: str, *, predicted: int, real: int) -> None:
        """Compare a prediction with what the engine counted."""
        if predicted <= 0:
            return
        audit = self._audits.setdefault(uid, _Audit())
        audit.predicted = audit.predicted * _AUDIT_DECAY + predicted
        audit.real = audit.real * _AUDIT_DECAY + min(real, predicted)

    def drop_replica(self, uid: str) -> None:
        """Forget everything of a replica."""
        self.routed.drop_replica(uid)
        self._audits.pop(uid, None)

    def _ratio(self, uid: str) -> float:
        audit = self._audits.get(uid)
        return 1.0 if audit is None else audit.real / audit.predicted
