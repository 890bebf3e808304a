"""What passes between the readers and the relay: heads of requests and answers, and how an answer breaks."""

from __future__ import annotations

import msgspec

Header = tuple[bytes, bytes]
"""Name in lower case, value."""


class RequestHead(msgspec.Struct, frozen=True, gc=False):
    """Method, target and headers of one request, validated."""

    method: bytes
    path: bytes
    """Target without query."""
    target: bytes
    headers: list[Header]
    index: dict[bytes, bytes]
    """First value by name."""
    http_1_1: bool
    keep_alive: bool
    content_length: int | None
    chunked: bool
    expects_continue: bool

    def find(self, name: bytes) -> bytes | None:
        """First value of a header, by its name in lower case."""
        return self.index.get(name)


class AnswerHead(msgspec.Struct, frozen=True, gc=False):
    """Status and headers of an engine's answer."""

    status: int
    headers: list[Header]
    content_length: int | None
    chunked: bool

    def find(self, name: bytes) -> bytes | None:
        """First value of a header, by its name in lower case."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


class Breakage(msgspec.Struct, frozen=True):
    """How an answer broke off."""

    message: str
    answered: bool
    """A byte of the answer had come."""
    nothing_accepted: bool
    """The engine's host provably took no byte of the request."""
    bad_answer: bool = False
