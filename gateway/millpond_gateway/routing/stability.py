"""Prefix instability: sessions whose first block changes between turns, so that no cache can help them.

Clients that put a counter or the time into the system prompt, or rewrite their history, pay full price each
turn; the share of such turns is reported per tenant.
"""

from __future__ import annotations

from typing import Final, NamedTuple

_MAX_SESSIONS: Final = 32768
_MAX_TENANTS: Final = 1024


class TenantStability(NamedTuple):
    """Turns of sessions seen before, and those whose first block had changed."""

    num_turns: int
    num_unstable: int


class StabilityBook:
    """First block key of each session's last turn, bounded; counts per tenant."""

    def __init__(self) -> None:
        self._first_keys: dict[int, int] = {}
        self._tenants: dict[str, TenantStability] = {}

    def note(self, tenant: str, session: int | None, first_key: int | None) -> bool:
        """Note one turn; True when the session's first block changed."""
        if session is None or first_key is None:
            return False
        known = self._first_keys.pop(session, None)
        self._first_keys[session] = first_key
        if len(self._first_keys) > _MAX_SESSIONS:
            del self._first_keys[next(iter(self._first_keys))]
        if known is None:
            return False
        unstable = known != first_key
        counts = self._tenants.get(tenant, TenantStability(0, 0))
        if tenant in self._tenants or len(self._tenants) < _MAX_TENANTS:
            self._tenants[tenant] = TenantStability(counts.num_turns + 1, counts.num_unstable + unstable)
        return unstable

    def view(self) -> dict[str, TenantStability]:
        """Counts per tenant."""
        return dict(self._tenants)
