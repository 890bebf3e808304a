"""What the relay must know about a stream of server-sent events it does not touch.

Where an event ends (only there may a comment or the error event go), whether the stream said `[DONE]`, and
the usage the engine reported. Constant cost per chunk: nothing is split or decoded on the way.
"""

from __future__ import annotations

from typing import Final

from millpond_gateway.proxy.usage import find_usage
from millpond_gateway.routing.records import Usage

COMMENT: Final = b": waiting\n\n"
_DONE: Final = b"data: [DONE]"
_USAGE: Final = b'"usage"'
_ERROR: Final = b"event: error\n"
_LATER_ERROR: Final = b"\n" + _ERROR
"""Never inside an event's JSON, where a line feed is escaped."""
_KEEP_BYTES: Final = 4096
"""Of an unfinished event, its tail; a usage chunk is a few hundred bytes."""


class StreamTail:
    """Follows one answer's bytes, streamed or not."""

    __slots__ = ("_last_usage", "_open_event", "done", "failed")

    def __init__(self) -> None:
        self.done = False
        """`[DONE]` has passed."""
        self.failed = False
        """An error event has passed: the engine has said itself that the stream is not whole."""
        self._open_event = b""
        self._last_usage = b""

    @property
    def at_boundary(self) -> bool:
        """No event is half sent."""
        return not self._open_event

    def feed(self, data: bytes) -> None:
        """Look at the next bytes of a stream."""
        if self._open_event:
            data = self._open_event + data
        if _USAGE in data:
            self._last_usage = data
        if data.startswith(_ERROR) or _LATER_ERROR in data:
            self.failed = True
        if data.endswith(b"\n\n"):
            self._open_event = b""
            if data.endswith(b"[DONE]\n\n"):
                self.done = True
            return
        end = data.rfind(b"\n\n")
        if end < 0:
            end = data.rfind(b"\r\n\r\n")
        self._open_event = data[end + 2 :][-_KEEP_BYTES:] if end >= 0 else data[-_KEEP_BYTES:]
        if _DONE in data[: end + 2][-64:]:
            self.done = True
        if data.endswith(b"\r\n\r\n"):
            self._open_event = b""
            self.done = self.done or data.endswith(b"[DONE]\r\n\r\n")

    def feed_plain(self, data: bytes) -> None:
        """Look at the next bytes of an answer that is no stream; usage stands near its end."""
        self._open_event = (self._open_event + data)[-_KEEP_BYTES:]

    def find_usage(self) -> Usage | None:
        """Token counts that the engine reported, if it did."""
        return find_usage(self._last_usage or self._open_event)
