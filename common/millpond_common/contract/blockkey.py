"""The routing key of KV blocks: a seeded XXH3-64 chain over full blocks of token ids, scheme version 1.

root   = XXH3-64(seed, scheme version, model, adapter, namespace, block size; each length-prefixed)
key[i] = XXH3-64(seed, key[i-1] as 8 bytes little-endian, the block's tokens as u32 little-endian)

A key is a hint for choosing a replica, never cache identity: inside the engine tokens are compared.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from sys import byteorder

import xxhash

SCHEME_VERSION = 1


@dataclass(frozen=True, slots=True)
class KeyScope:
    """What two prompts must share before their blocks may match."""

    model: str
    block_tokens: int
    seed: int = 0
    adapter: str = ""
    namespace: str = ""
    """Tenant, or the salt a tenant asked for."""

    def compute_root(self) -> int:
        """Key of the empty prefix."""
        parts = [str(SCHEME_VERSION), self.model, self.adapter, self.namespace, str(self.block_tokens)]
        encoded = [part.encode() for part in parts]
        data = b"".join(len(part).to_bytes(4, "little") + part for part in encoded)
        return xxhash.xxh3_64_intdigest(data, seed=self.seed)


def make_namespace(tenant: str, salt: str) -> str:
    """Namespace of a tenant's blocks: the tenant, narrowed by the salt it asked for. One form for gateway and engine."""
    return f"{tenant}/{salt}" if salt else tenant


def compute_block_keys(scope: KeyScope, tokens: Sequence[int]) -> list[int]:
    """Keys of the full blocks of `tokens`, in order; a partial tail has none."""
    return extend_block_keys(scope, scope.compute_root(), tokens)


def extend_block_keys(scope: KeyScope, parent: int, tokens: Sequence[int]) -> list[int]:
    """Keys of the full blocks of `tokens` that follow the block with key `parent`."""
    words = array("I", tokens)
    if byteorder == "big":
        words.byteswap()
    raw = words.tobytes()
    size = scope.block_tokens * 4
    keys: list[int] = []
    for offset in range(0, len(raw) - size + 1, size):
        parent = xxhash.xxh3_64_intdigest(
            parent.to_bytes(8, "little") + raw[offset : offset + size], seed=scope.seed
        )
        keys.append(parent)
    return keys
