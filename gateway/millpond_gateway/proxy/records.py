"""What passes between the readers and the relay: heads of requests and answers, what is known of a body,
and how an answer breaks.
"""

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


class ParsedBody(msgspec.Struct, frozen=True, gc=False):
    """What the gateway knows about one request's body."""

    model: str
    """Empty when the body names none."""
    stream: bool
    prompt: bytes
    """Raw JSON of `messages` or `prompt`: the text behind the fallback key."""
    template: bytes
    """Raw JSON of what else shapes the prompt: tools, template and its arguments."""
    max_output_tokens: int | None
    num_choices: int
    cache_salt: str
    service_tier: str
    num_bytes: int
    hides_usage: bool = False
    """A stream whose usage the client did not ask for."""
    has_stream_options: bool = False
    """The field is there, be it null."""
    num_prompt_bytes: int = 0
    """Of prompt and template, known after they are forgotten."""

    def forget_prompt(self) -> ParsedBody:
        """The same without prompt and template: an answer may take an hour, and nobody reads them any more."""
        return msgspec.structs.replace(self, prompt=b"", template=b"")
