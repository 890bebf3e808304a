"""Keys of a prompt for the prefix index, from its bytes; pure.

The gateway has no tokenizer: a prompt of token ids gets the engine's own block keys, any other prompt gets a
chain over chunks of its JSON text. A conversation's next turn repeats the bytes of the turns before it, so equal
prefixes give equal leading keys. The scope (model, tenant or salt, tools, template) is the root of the chain.
"""

from __future__ import annotations

from typing import Final

import msgspec
import xxhash

from millpond_common.contract.blockkey import KeyScope, compute_block_keys
from millpond_gateway.proxy.body import ParsedBody
from millpond_gateway.routing.records import KeyKind, PromptKeys

CHUNK_BYTES: Final = 128
BYTES_PER_TOKEN: Final = 4.0
"""Of JSON text, before a pool's own ratio was learned."""
MAX_KEYS: Final = 4096
"""Of one prompt: half a megabyte of text; what follows is too long ago to be cached apart."""
_IDS: Final = msgspec.json.Decoder(list[int])


def compute_keys(
    body: ParsedBody, scope: KeyScope, *, bytes_per_token: float = BYTES_PER_TOKEN
) -> PromptKeys:
    """Keys and token count of a prompt."""
    if body.prompt.startswith(b"[") and not body.template:
        exact = _compute_token_keys(body.prompt, scope)
        if exact is not None:
            return exact
    return _compute_text_keys(body, scope, bytes_per_token)


def _compute_token_keys(prompt: bytes, scope: KeyScope) -> PromptKeys | None:
    if prompt[1:16].lstrip()[:1] not in b"0123456789":
        return None
    try:
        ids = _IDS.decode(prompt)
        keys = compute_block_keys(scope, ids)
    except (msgspec.MsgspecError, OverflowError):
        return None
    kind = KeyKind.TOKENS if keys else KeyKind.NONE
    return PromptKeys(keys=keys, tokens_per_key=float(scope.block_tokens), num_tokens=len(ids), kind=kind)


def _compute_text_keys(body: ParsedBody, scope: KeyScope, bytes_per_token: float) -> PromptKeys:
    prompt = body.prompt
    num_tokens = max(1, round(len(prompt) / bytes_per_token))
    digest, seed = xxhash.xxh3_64_intdigest, scope.seed
    parent = digest(scope.compute_root().to_bytes(8, "little") + body.template, seed=seed)
    end = min(len(prompt), MAX_KEYS * CHUNK_BYTES)
    keys: list[int] = []
    for start in range(0, end - CHUNK_BYTES + 1, CHUNK_BYTES):
        parent = digest(parent.to_bytes(8, "little") + prompt[start : start + CHUNK_BYTES], seed=seed)
        keys.append(parent)
    return PromptKeys(
        keys=keys,
        tokens_per_key=CHUNK_BYTES / bytes_per_token,
        num_tokens=num_tokens,
        kind=KeyKind.TEXT if keys else KeyKind.NONE,
    )


class TokenRatio:
    """Bytes of prompt per token of one pool, learned from what engines counted."""

    def __init__(self) -> None:
        self.bytes_per_token = BYTES_PER_TOKEN

    def observe(self, num_bytes: int, num_tokens: int) -> None:
        """Learn from one finished request; short prompts are mostly template."""
        if num_bytes >= 256 and num_tokens > 0:
            seen = min(32.0, max(0.25, num_bytes / num_tokens))
            self.bytes_per_token += 0.05 * (seen - self.bytes_per_token)
