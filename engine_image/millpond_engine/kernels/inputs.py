"""What attention needs to know about one step, and about the cache it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Constants of a model's attention and of its cache."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    norm_eps: float
    """Of the norms over heads, where the model has them."""

    @property
    def group(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def qkv_size(self) -> int:
        """Width of a fused q, k, v row."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """A block's bytes are contiguous over all layers, so that copies and swaps move one run."""
        return (num_blocks, self.num_layers, 2, self.num_kv_heads, self.block_tokens, self.head_dim)


@dataclass(slots=True)
class StepInputs:
    """A flattened batch: row i computes the tokens `query_offsets[i] .. query_offsets[i + 1]`."""

    rows: torch.Tensor
    """int32 `[num_rows]`: which line of the block tables belongs to each."""
    starts: torch.Tensor
    """int32 `[num_rows]`: position of the first computed token; all before it are in the cache."""
    query_offsets: torch.Tensor
    """int32 `[num_rows + 1]`."""
    positions: torch.Tensor
    """int64 `[num_tokens]`."""
    block_tables: torch.Tensor
    """int32 `[max_rows, max_blocks_per_row]`, the whole state table."""
    num_tokens: int
    num_decodes: int = 0
    """Leading rows known to compute one token each; a GPU splits their context over many programs."""


class PagedAttention(Protocol):
    """Rotation, cache write and attention of one device."""

    def bind(self, inputs: StepInputs) -> None:
        """Use these inputs for the layers of the next step."""
        ...

    def __call__(
        self, layer: int, qkv: torch.Tensor, head_norms: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        """Run one layer; `qkv` is `[num_tokens, qkv_size]` and may be overwritten."""
        ...
