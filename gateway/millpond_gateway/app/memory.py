"""Give memory back after a burst: many streams leave a heap that nothing else would return to the system."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from typing import Final

_MIN_PEAK: Final = 256
"""Open requests below which a burst is not worth a collection."""
_QUIET_SHARE: Final = 10
_QUIET_SECONDS: Final = 5.0
_FREE_LIST: Final = 256
"""Objects that the event loop keeps of each kind: 250 in uvloop, 255 in asyncio."""
_TIMER_SECONDS: Final = 0.001


class Trimmer:
    """Gives back once after each burst, when open requests have stayed below a tenth of its peak."""

    def __init__(self) -> None:
        self._peak = 0
        self._quiet_since: float | None = None
        self._trim = _find_malloc_trim()

    def look(self, num_requests: int, now: float) -> bool:
        """Follow the number of open requests; True when now is the time to give memory back."""
        self._peak = max(self._peak, num_requests)
        if self._peak < _MIN_PEAK or num_requests * _QUIET_SHARE > self._peak:
            self._quiet_since = None
            return False
        if self._quiet_since is None:
            self._quiet_since = now
        if now - self._quiet_since < _QUIET_SECONDS:
            return False
        self._peak, self._quiet_since = num_requests, None
        return True

    async def give_back(self) -> None:
        """Free what only caches hold, then return free memory to the system."""
        await renew_free_lists()
        gc.collect()
        if self._trim is not None:
            self._trim(0)


async def renew_free_lists() -> None:
    """Have the event loop keep objects made now instead of a burst's, each of which keeps a megabyte from being returned.

    A free list gives out all it holds before a new object is made, and takes back what is freed until it is full. So
    the second half made here is new, and lies where much is in use; freed first, it leaves no room for the first half.
    """
    loop = asyncio.get_running_loop()
    count = range(2 * _FREE_LIST)
    kept: list[list[object]] = [
        [loop.call_soon(_do_nothing) for _ in count],
        [loop.call_later(_TIMER_SECONDS, _do_nothing) for _ in count],
        [iter(loop.create_future()) for _ in count],
    ]
    await asyncio.sleep(2 * _TIMER_SECONDS)
    for objects in kept:
        del objects[_FREE_LIST:]
        objects.clear()


def _do_nothing() -> None:
    pass


def _find_malloc_trim() -> ctypes._NamedFuncPointer | None:
    """The C library's function, where there is one."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
