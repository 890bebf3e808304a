"""Block keys of a prompt: from tokens where they are known, else from chunks of its text.

The scope of every key is model, adapter, tenant or salt, and block size; what else shapes the prompt (tools,
template, template arguments) is part of the tokens themselves, and part of the root of text keys. Text keys live
under a scope of their own, so they never match token keys. Media inside the text are part of its bytes, so the
same words with another image differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import xxhash

from millpond_common.contract.blockkey import KeyScope, compute_block_keys
from millpond_gateway.routing.records import KeyKind, PromptKeys

CHUNK_BYTES: Final = 128
"""Text of one fallback key."""
MAX_TEXT_KEYS: Final = 4096
"""Chunks that get a key: half a megabyte, which takes about a millisecond; images make texts of many more."""
_TEXT_SCHEME: Final = b"millpond text keys 1"
_DEFAULT_BYTES_PER_TOKEN: Final = 4.0
_DECAY: Final = 0.99


def make_token_keys(scope: KeyScope, tokens: Sequence[int]) -> PromptKeys:
    """Keys of a prompt whose tokens the engine will see exactly so."""
    return PromptKeys(
        keys=compute_block_keys(scope, tokens),
        tokens_per_key=float(scope.block_tokens),
        num_tokens=len(tokens),
        kind=KeyKind.TOKENS,
    )


def make_text_keys(
    scope: KeyScope,
    text: bytes,
    *,
    template: bytes = b"",
    bytes_per_token: float = _DEFAULT_BYTES_PER_TOKEN,
    root: int | None = None,
) -> PromptKeys:
    """Fallback keys of a prompt's text; `template` is whatever else the chat template reads, tools included.

    Count each use: prediction from text is approximate. `root` is the scope's, where the caller keeps it.
    """
    num_tokens = max(round((len(text) + len(template)) / bytes_per_token), 1)
    scope_root = scope.compute_root() if root is None else root
    data = _TEXT_SCHEME + scope_root.to_bytes(8, "little") + template
    keys = _chain_text(xxhash.xxh3_64_intdigest(data, seed=scope.seed), text)
    return PromptKeys(
        keys=keys,
        tokens_per_key=CHUNK_BYTES / bytes_per_token,
        num_tokens=num_tokens,
        kind=KeyKind.TEXT if keys else KeyKind.NONE,
    )


def _chain_text(parent: int, text: bytes) -> list[int]:
    """Each key hashes its chunk under the key before it, used as the seed: one call and one slice a chunk."""
    keys: list[int] = []
    end = min(len(text), MAX_TEXT_KEYS * CHUNK_BYTES)
    for offset in range(0, end - CHUNK_BYTES + 1, CHUNK_BYTES):
        parent = xxhash.xxh3_64_intdigest(text[offset : offset + CHUNK_BYTES], parent)
        keys.append(parent)
    return keys


class TokenEstimator:
    """Bytes of request text per prompt token of one pool, learned from the engines' usage."""

    def __init__(self) -> None:
        self._bytes = _DEFAULT_BYTES_PER_TOKEN * 100
        self._tokens = 100.0

    @property
    def bytes_per_token(self) -> float:
        """Best estimate."""
        return self._bytes / self._tokens

    def observe(self, *, num_bytes: int, prompt_tokens: int) -> None:
        """Learn from one answered request."""
        if num_bytes > 0 and prompt_tokens > 0:
            self._bytes = self._bytes * _DECAY + num_bytes
            self._tokens = self._tokens * _DECAY + prompt_tokens
