"""Tokens to text as they come: only whole characters are released, and the pieces join to the full decode."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from millpond_engine.text.tokenizer import Tokenizer


class Detokenizer:
    """Text of one sequence, piece by piece."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.facts.special_token_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The characters that `token_ids` complete."""
        data = b"".join(
            self._tokenizer.token_bytes(token) for token in token_ids if token not in self._skipped
        )
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for bytes that never became a character."""
        return self._decoder.decode(b"", final=True)
