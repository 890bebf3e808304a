"""Give memory back after a burst: many streams leave a heap that nothing else would return to the system."""

from __future__ import annotations

import ctypes
import gc

_MIN_PEAK = 256
"""Open requests below which a burst is not worth a collection."""
_QUIET_SHARE = 10
_QUIET_SECONDS = 5.0


class Trimmer:
    """Collects and trims once after each burst, when open requests have stayed below a tenth of its peak."""

    def __init__(self) -> None:
        self._peak = 0
        self._quiet_since: float | None = None
        self._trim = _find_malloc_trim()

    def look(self, num_requests: int, now: float) -> bool:
        """Follow the number of open requests; True when memory was given back now."""
        self._peak = max(self._peak, num_requests)
        if self._peak < _MIN_PEAK or num_requests * _QUIET_SHARE > self._peak:
            self._quiet_since = None
            return False
        if self._quiet_since is None:
            self._quiet_since = now
        if now - self._quiet_since < _QUIET_SECONDS:
            return False
        self._peak, self._quiet_since = num_requests, None
        gc.collect()
        if self._trim is not None:
            self._trim(0)
        return True


def _find_malloc_trim() -> ctypes._NamedFuncPointer | None:
    """The C library's function, where there is one."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
