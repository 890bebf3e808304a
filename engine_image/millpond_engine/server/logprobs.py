"""Log-probabilities in the two OpenAI forms, and prompt log-probabilities in vLLM's form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from millpond_engine.records.step import TokenLogprobs
from millpond_engine.server.choices import TokenEntry
from millpond_engine.text.detokenizer import Detokenizer
from millpond_engine.text.tokenizer import Tokenizer, describe_token

MAX_LOGPROBS = 20
_LOWEST = -9999.0
"""Sent for minus infinity, which JSON cannot say."""


class LogprobWriter:
    """Writes entries with this call's way to spell a token."""

    def __init__(self, tokenizer: Tokenizer, num_top: int, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._as_ids = as_ids

    def name(self, token: int) -> str:
        """Text of a token, or `token_id:N` when asked for."""
        return f"token_id:{token}" if self._as_ids else describe_token(self._tokenizer, token)

    def make_chat(self, entries: Iterable[TokenEntry]) -> dict[str, Any]:
        """`logprobs` of a chat choice."""
        return {"content": [self._make_chat_entry(entry) for entry in entries]}

    def _make_chat_entry(self, entry: TokenEntry) -> dict[str, Any]:
        logprobs = entry.logprobs
        top = logprobs.top[: self._num_top] if logprobs else ()
        own = self._make_pair(entry.token, logprobs.logprob if logprobs else None)
        own["top_logprobs"] = [self._make_pair(token, value) for token, value in top]
        return own

    def _make_pair(self, token: int, value: float | None) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        return {"token": self.name(token), "logprob": clamp(value), "bytes": list(data)}

    def make_completion(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None], offsets: Sequence[int]
    ) -> dict[str, Any]:
        """`logprobs` of a completion choice whose tokens begin at these characters of its text."""
        return {
            "tokens": [self.name(token) for token in tokens],
            "token_logprobs": [clamp(entry.logprob) if entry else None for entry in logprobs],
            "top_logprobs": [
                self._make_top(token, entry) if entry else None
                for token, entry in zip(tokens, logprobs, strict=True)
            ],
            "text_offset": list(offsets),
        }

    def _make_top(self, token: int, entry: TokenLogprobs) -> dict[str, float | None]:
        top: dict[str, float | None] = {}
        for other, value in entry.top[: self._num_top]:
            top.setdefault(self.name(other), clamp(value))
        top.setdefault(self.name(token), clamp(entry.logprob))
        return top


class TextOffsets:
    """Where the tokens of one choice begin in its text, in characters.

    The tokens of one character all begin where it does, and what the text leaves out has no length, so that
    `text_offset` points into the text that the client has.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._offset = 0

    def take_prompt(self, tokens: Sequence[int], text: str) -> list[int]:
        """Offsets of an echoed prompt. What its tokens spell beyond `text` stands in front: a token or a space
        that tokenizing added.
        """
        whole = TextOffsets(self._tokenizer, skip_special_tokens=False)
        offsets = whole.take(tokens)
        added = max(0, whole._offset - len(text))
        self._offset = len(text)
        return [max(0, offset - added) for offset in offsets]

    def take(self, tokens: Sequence[int]) -> list[int]:
        """Offsets of the next tokens."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push((token,)))
        return offsets


def make_prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int
) -> list[dict[str, Any] | None]:
    """VLLM's `prompt_logprobs`: null for the first token, then objects by token id."""
    rows: list[dict[str, Any] | None] = [None]
    for token, entry in zip(prompt[1:], logprobs, strict=True):
        row = {
            str(other): _describe(tokenizer, other, value, rank)
            for rank, (other, value) in enumerate(entry.top[:num_top], 1)
        }
        row.setdefault(str(token), _describe(tokenizer, token, entry.logprob, entry.rank))
        rows.append(row)
    return rows


def _describe(tokenizer: Tokenizer, token: int, value: float, rank: int) -> dict[str, Any]:
    return {"logprob": clamp(value), "rank": rank, "decoded_token": describe_token(tokenizer, token)}


def clamp(value: float | None) -> float | None:
    """A number JSON can carry."""
    return None if value is None else max(value, _LOWEST)
