"""A grammar as a caller wrote it, and the errors it may end in.

GrammarError       the caller's fault: it cannot be compiled; the message says why, without a stack or an address
GrammarBusyError   the world's fault: too many grammars wait to be compiled; retry
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""Between two tokens of JSON: a small model left free to write it may write nothing else."""
_MAX_MESSAGE = 300


class GrammarKind(StrEnum):
    """How the text of a grammar is read."""

    JSON_SCHEMA = "json_schema"
    """A JSON schema; white space between its tokens is free, within a bound."""
    COMPACT_JSON_SCHEMA = "compact_json_schema"
    """The same without any white space."""
    REGEX = "regex"
    """A regular expression that the whole text matches."""
    LARK = "lark"
    """The library's own form."""
    EBNF = "ebnf"
    """Lark, or the `root ::= …` form of llama.cpp and XGrammar."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What a text must follow; equal ones are the same grammar."""

    kind: GrammarKind
    text: str
    keep_ends: bool = True
    """The model may end the text where the grammar allows it; else only the grammar's own end ends it (`ignore_eos`)."""


class GrammarError(ValueError):
    """The grammar cannot be compiled; the message is for its author."""


class GrammarBusyError(RuntimeError):
    """Too many grammars wait to be compiled."""


def embed_schema(schema: dict[str, Any]) -> str:
    """A JSON schema inside a Lark rule."""
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE}})


def clean_message(text: str) -> str:
    """One short printable line: the library draws where the error is and repeats the source."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = next((line for line in lines if line.startswith("error:")), "").removeprefix("error:").strip()
    first = lines[0] if lines else "unknown error"
    shown = f"{first.removesuffix(':')}: {told}" if told and told not in first else first
    return shown.encode("ascii", "backslashreplace").decode()[:_MAX_MESSAGE]
