"""Bounds on everything a client can send or hold open."""

from __future__ import annotations

from dataclasses import dataclass

from millpond_common.contract.openai import MAX_BODY_BYTES


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Each bound has one place; the reference documentation lists them from here."""

    max_body_bytes: int = MAX_BODY_BYTES
    max_prompts: int = 256
    """Prompts of one completions call."""
    max_n: int = 128
    max_beams: int = 32
    max_messages: int = 4096
    max_tools: int = 256
    max_stop_characters: int = 1024
    max_stop_tokens: int = 64
    max_biases: int = 1024
    max_allowed_tokens: int = 65_536
    max_bad_words: int = 128
    max_salt_characters: int = 1024
    max_schema_characters: int = 131_072
    """Of a JSON schema, of all choices, and of the schemas of all tools that a call may name."""
    max_schema_depth: int = 100
    """Levels of JSON; an object inside an object is two."""
    max_schema_properties: int = 1000
    max_regex_characters: int = 8192
    max_grammar_characters: int = 16_384
    max_choices: int = 1024
    max_detokenized_tokens: int = 262_144
    max_template_bytes: int = 65_536
    body_seconds: float = 30.0
    """Time a client has to send its body."""
    idle_connection_seconds: float = 75.0
    """A connection without a request is closed after this long, from its first moment on."""
    slow_reader_seconds: float = 60.0
    """A client that takes none of its stream for this long loses it."""
    max_unread_tokens: int = 65_536
    """Tokens of one call that may wait for its handler."""
