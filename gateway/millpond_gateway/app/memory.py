"""Give memory back after a burst: many streams leave a heap that nothing else would return to the system.

Python's own allocator returns whole MiB only, and one small object that lives on keeps its own. Images therefore run on
jemalloc, which returns single pages; what runs without it has the C library's `malloc_trim` at least.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
from collections.abc import Callable
from typing import Final

_MIN_PEAK: Final = 256
"""Open requests below which a burst is not worth a collection."""
_QUIET_SHARE: Final = 10
_QUIET_SECONDS: Final = 5.0
_FREE_LIST: Final = 256
"""Objects that the event loop keeps of each kind: 250 in uvloop, 255 in asyncio."""
_TIMER_SECONDS: Final = 0.001
_FLUSH_THREAD: Final = b"thread.tcache.flush"
_PURGE_ALL: Final = b"arena.4096.purge"
"""jemalloc: unused pages of all arenas (MALLCTL_ARENAS_ALL) go back now, not after their decay."""


class Trimmer:
    """Gives back once after each burst, when open requests have stayed below a tenth of its peak."""

    def __init__(self) -> None:
        self._peak = 0
        self._quiet_since: float | None = None
        self._return_free = find_return_free()

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
        self._return_free()


async def renew_free_lists() -> None:
    """Have the event loop keep objects made now instead of a burst's, each of which keeps its page from being returned.

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


def find_allocator() -> str:
    """Where Python's objects lie: pymalloc is its own allocator, malloc the C library's."""
    if os.environ.get("PYTHONMALLOC") != "malloc":
        return "pymalloc"
    return "malloc" if _find_function("mallctl") is None else "jemalloc"


def find_return_free() -> Callable[[], None]:
    """What returns free pages to the system, by the allocator that the process was started with."""
    control, trim = _find_function("mallctl"), _find_function("malloc_trim")
    if control is not None:
        return lambda: _purge(control)
    return _do_nothing if trim is None else lambda: _trim(trim)


def _trim(trim: Callable[[int], int]) -> None:
    trim(0)


def _purge(control: Callable[..., int]) -> None:
    nothing = (None, None, None, ctypes.c_size_t(0))
    for command in (_FLUSH_THREAD, _PURGE_ALL):
        control(command, *nothing)


def _do_nothing() -> None:
    pass


def _find_function(name: str) -> Callable[..., int] | None:
    """A function of the process's libraries, where there is one."""
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
    return found
