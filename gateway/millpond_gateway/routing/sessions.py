"""Which replica served a session last: a bounded memory that feeds the affinity term of the cost."""

from __future__ import annotations


class SessionBook:
    """Last replica per session hash, least recently used forgotten first."""

    def __init__(self, max_sessions: int = 65536) -> None:
        self._homes: dict[int, str] = {}
        self._max_sessions = max_sessions

    def __len__(self) -> int:
        return len(self._homes)

    def note(self, session: int, uid: str) -> None:
        """Remember where the session went."""
        self._homes.pop(session, None)
        self._homes[session] = uid
        if len(self._homes) > self._max_sessions:
            del self._homes[next(iter(self._homes))]

    def find(self, session: int | None) -> str | None:
        """Replica of the session, if one is remembered."""
        return None if session is None else self._homes.get(session)

    def drop_replica(self, uid: str) -> None:
        """Forget the sessions of a replica that is gone."""
        self._homes = {session: home for session, home in self._homes.items() if home != uid}
