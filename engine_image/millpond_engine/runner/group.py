"""What the ranks of an engine agree on after each has loaded its share: pool, bytes of a block, speed of copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from millpond_engine.model.decoder import Decoder
from millpond_engine.model.split import Share
from millpond_engine.model.split_ops import SplitOps
from millpond_engine.runner.collectives import TorchCollectives
from millpond_engine.runner.memory import PoolSize, PoolTooSmallError

T = TypeVar("T")


class RankGroup:
    """The ranks that share a model. Every rank makes the same calls in the same order."""

    def __init__(self, share: Share | None = None, collectives: TorchCollectives | None = None) -> None:
        """Without collectives this rank is alone, and every agreement is its own word."""
        self._share = share
        self._collectives = collectives

    def split(self, model: Decoder) -> None:
        """Let the model's products be summed and gathered over the ranks."""
        if self._share is not None and self._collectives is not None:
            model.ops = SplitOps(model.ops, self._share, model.config.vocabulary_size, self._collectives)

    def exchange(self, value: T) -> list[T]:
        """This value of every rank, by rank."""
        return [value] if self._collectives is None else self._collectives.exchange(value)

    def agree_on_pool(self, size_pool: Callable[[], PoolSize]) -> PoolSize:
        """The smallest pool of all ranks: one block table serves them all.

        Raises:
            PoolTooSmallError: on every rank, when one has no room for a block.
        """
        try:
            mine = size_pool()
        except PoolTooSmallError as error:
            mine = PoolSize(0, str(error))
        found = self.exchange((mine.num_blocks, mine.limited_by))
        smallest = min(range(len(found)), key=lambda rank: found[rank][0])
        num_blocks, limited_by = found[smallest]
        if num_blocks < 1:
            raise PoolTooSmallError(limited_by)
        return PoolSize(num_blocks, limited_by if smallest == 0 else f"{limited_by} (rank {smallest})")

    def agree_on_copies(self, own_bytes: int, own_bytes_per_second: float) -> tuple[int, float]:
        """(bytes of a block on all ranks, bytes per second at which all ranks together copy blocks)."""
        found = self.exchange((own_bytes, own_bytes / own_bytes_per_second))
        total = sum(size for size, _ in found)
        return total, total / max(seconds for _, seconds in found)
