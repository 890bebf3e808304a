"""The operations of one rank: those of its device, with a sum or a gathering over all ranks where a product was split."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from millpond_engine.model.ops import Ops
from millpond_engine.model.split import Share


class Collectives(Protocol):
    """What the ranks of a group do together; every rank makes the same calls in the same order."""

    def sum(self, x: torch.Tensor) -> None:
        """Replace `x` by its sum over all ranks."""
        ...

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """`x` of every rank, by rank: `[size, *x.shape]`."""
        ...


class SplitOps:
    """A device's operations for a rank's share of the weights.

    The residual stream, and what norms make of it, is whole and the same on every rank; so are the scores, and
    with them every rank's choice of tokens.
    """

    def __init__(self, ops: Ops, share: Share, vocabulary_size: int, collectives: Collectives) -> None:
        self._ops = ops
        self._share = share
        self._vocabulary_size = vocabulary_size
        self._collectives = collectives
        self.pack, self.pack_gated, self.vector = ops.pack, ops.pack_gated, ops.vector
        self.embed, self.rms_norm, self.select = ops.embed, ops.rms_norm, ops.select
        self.linear, self.gated, self.argmax = ops.linear, ops.gated, ops.argmax
        self.partial, self.add = ops.partial, ops.add

    def linear_add(self, x: torch.Tensor, weight: Any, residual: torch.Tensor) -> None:
        product = self._ops.partial(x, weight)
        self._collectives.sum(product)
        self._ops.add(product, residual)

    def scores(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        """Scores over the whole vocabulary; the last ranks' spans are filled up to the length of the first's."""
        mine = self._ops.scores(x, weight)
        longest = -(-self._vocabulary_size // self._share.size)
        if mine.shape[1] < longest:
            mine = torch.nn.functional.pad(mine, (0, longest - mine.shape[1]))
        parts = self._collectives.gather(mine)
        return parts.transpose(0, 1).reshape(x.shape[0], -1)[:, : self._vocabulary_size].contiguous()
