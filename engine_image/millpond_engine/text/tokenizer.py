"""What the server needs of a tokenizer: ids of a text, and the exact bytes of an id.

With bytes per token a text is put together without ever decoding a window twice, and what is released
in pieces equals the whole by construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """Facts about a vocabulary that never change."""

    vocabulary_size: int
    eos_token_ids: tuple[int, ...]
    special_token_ids: frozenset[int]
    """Left out of text unless asked for."""
    bos_token_id: int | None = None
    chat_template: str | None = None
    tool_template: str | None = None
    """For conversations with tools, where the model brings two templates."""
    template_variables: dict[str, str] = field(default_factory=dict)
    """Names of special tokens that chat templates use: bos_token, eos_token, …"""
    adds_space: bool = False
    """Encoding puts a space before a text, which decoding the whole takes away again."""


class Tokenizer(Protocol):
    """Text to ids, ids to bytes. Thread-safe."""

    @property
    def facts(self) -> TokenizerFacts:
        """Facts fixed at load time."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of `text`; special tokens written out in it become their ids."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes the token stands for, possibly a part of a character; empty for an id without text."""
        ...


class TokenizerError(ValueError):
    """The files do not hold a tokenizer this engine can run; the message names what is missing."""


def measure_longest_token(tokenizer: Tokenizer) -> int:
    """Bytes of the longest token: no text of more than N times as many fits N tokens."""
    return max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.facts.vocabulary_size))


def decode(tokenizer: Tokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """Text of `token_ids`; bytes that are no character become U+FFFD."""
    facts = tokenizer.facts
    special = facts.special_token_ids if skip_special_tokens else frozenset()
    pieces = [tokenizer.token_bytes(token) for token in token_ids if token not in special]
    if facts.adds_space:
        first = next((i for i, token in enumerate(token_ids) if token not in facts.special_token_ids), None)
        offset = 0 if first is None else first - sum(1 for token in token_ids[:first] if token in special)
        if first is not None and pieces[offset].startswith(b" "):
            pieces[offset] = pieces[offset][1:]
    return b"".join(pieces).decode("utf-8", "replace")


def describe_token(tokenizer: Tokenizer, token_id: int) -> str:
    """Text of one token alone, for logprobs."""
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")
