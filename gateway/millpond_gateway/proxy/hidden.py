"""Usage of streams whose clients did not ask for it: asked of the engine, hidden from the client.

Only then is a body changed on its way, and only by the one field; only then is an event kept back until it is
whole, which delays nothing, since no client can read half an event.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

_ASK: Final = b'"stream_options":{"include_usage":true},'
_USAGE: Final = b'"usage"'
_MAX_HELD_BYTES: Final = 16_384
"""A longer event is no usage event and passes as it comes."""
_EVENT: Final = re.compile(rb"(?s).*?(?:\r\n\r\n|\n\n)")


class _Options(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Chunk(msgspec.Struct):
    choices: list[msgspec.Raw] | None = None
    usage: dict[str, Any] | None = None


_OPTIONS: Final = msgspec.json.Decoder(_Options | None)
_CHUNK: Final = msgspec.json.Decoder(_Chunk)
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def must_ask(options: msgspec.Raw) -> bool:
    """Whether a stream's `stream_options` leave its usage untold; what the engine will refuse is left to it."""
    try:
        read = _OPTIONS.decode(options)
    except msgspec.MsgspecError:
        return False
    return read is None or not (read.include_usage or read.continuous_usage_stats)


def ask_usage(body: bytes, *, has_options: bool) -> bytes:
    """A valid JSON object, not empty, that asks for usage; every other byte stays as it was.

    `has_options`: it has the field already, be it null.
    """
    if not has_options:
        start = body.index(b"{") + 1
        return b"".join((body[:start], _ASK, memoryview(body)[start:]))
    fields = _FIELDS.decode(body)
    options = msgspec.json.decode(fields.get("stream_options", b"null")) or {}
    fields["stream_options"] = msgspec.Raw(msgspec.json.encode({**options, "include_usage": True}))
    return msgspec.json.encode(fields)


class UsageFilter:
    """Takes the usage event out of one stream; everything else passes as it came."""

    __slots__ = ("_held", "_passing")

    def __init__(self) -> None:
        self._held = b""
        self._passing = False

    @property
    def at_boundary(self) -> bool:
        """No event is half passed on; one that is kept back has not begun for the client."""
        return not self._passing

    def feed(self, data: bytes) -> bytes:
        """What of the stream so far may go on; empty when nothing may yet."""
        if self._passing:
            found = _EVENT.match(data)
            if found is None:
                return data
            self._passing = False
            return found[0] + self.feed(data[found.end() :])
        if self._held:
            data = self._held + data
            self._held = b""
        if _USAGE not in data and data.endswith(b"\n\n"):
            return data
        end = max(data.rfind(b"\n\n") + 2, data.rfind(b"\r\n\r\n") + 4)
        whole, rest = (data[:end], data[end:]) if end >= 4 else (b"", data)
        if _USAGE in whole:
            whole = b"".join(event for event in _EVENT.findall(whole) if not is_usage_event(event))
        if len(rest) > _MAX_HELD_BYTES:
            self._passing = True
            return whole + rest
        self._held = rest
        return whole

    def take_rest(self) -> bytes:
        """An event that the engine's clean end left without its blank line."""
        rest, self._held = self._held, b""
        return rest


def is_usage_event(event: bytes) -> bool:
    """Whether an event tells the usage and nothing else."""
    if _USAGE not in event or not event.startswith(b"data:"):
        return False
    try:
        chunk = _CHUNK.decode(event[5:])
    except msgspec.MsgspecError:
        return False
    return chunk.choices == [] and chunk.usage is not None
