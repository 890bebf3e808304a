"""Which part of a model one rank of a tensor-parallel group holds.

Shoeybi et al., "Megatron-LM" (2019): q, k, v, gate and up are split by rows (outputs), the attention's output and down
by columns (inputs), so that each rank computes whole heads and a sum over ranks follows twice in a layer. Heads
are split by key-value group, unevenly where the groups do not divide; with more ranks than groups a group's key-value
head is held by several ranks, which share its query heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from millpond_engine.model.config import ModelConfig
from millpond_engine.model.errors import UnsupportedModelError

_UNITS = (256, 64, 32)
"""Widths that the feed-forward layers are cut at: blocks of quantized files, then vectors of the kernels."""


@dataclass(frozen=True, slots=True)
class Span:
    """`count` neighbours from `first` on."""

    first: int
    count: int

    def times(self, width: int) -> Span:
        """The same span in units `width` times smaller."""
        return Span(self.first * width, self.count * width)

    @property
    def last(self) -> int:
        """One behind the last."""
        return self.first + self.count


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a model."""

    rank: int
    size: int
    """Ranks in the group."""
    heads: Span
    kv_heads: Span
    inner: Span
    """Of the feed-forward width."""
    vocabulary: Span
    """Scores this rank computes; every rank's span but the last ones' is as long as rank 0's."""

    def count_weights(self, config: ModelConfig, *, packed_head: bool) -> int:
        """Elements of this rank's matrices. A packed head is a copy also where it is the embedding's twin."""
        hidden, dim = config.hidden_size, config.head_dim
        layer = hidden * dim * 2 * (self.heads.count + self.kv_heads.count) + 3 * hidden * self.inner.count
        table = config.vocabulary_size * hidden
        own_head = packed_head or not config.tied_embeddings
        return config.num_layers * layer + table + (self.vocabulary.count * hidden if own_head else 0)

    def narrow(self, config: ModelConfig) -> ModelConfig:
        """The model as this rank's layers see it: fewer heads, a narrower feed-forward, the same stream."""
        return replace(
            config,
            num_heads=self.heads.count,
            num_kv_heads=self.kv_heads.count,
            intermediate_size=self.inner.count,
        )


def compute_share(config: ModelConfig, rank: int = 0, size: int = 1) -> Share:
    """Cut a model for one rank of `size`.

    Raises:
        UnsupportedModelError: more ranks than heads, or a model too narrow.
    """
    if size > config.num_heads:
        raise UnsupportedModelError(
            f"tensorParallelSize {size} is more than the {config.num_heads} attention heads of this model"
        )
    heads, kv_heads = _split_heads(config, rank, size)
    inner = _split_inner(config.intermediate_size, rank, size)
    slice_size = -(-config.vocabulary_size // size)
    first = min(rank * slice_size, config.vocabulary_size)
    vocabulary = Span(first, min(slice_size, config.vocabulary_size - first))
    if inner.count < 1 or vocabulary.count < 1:
        raise UnsupportedModelError(f"this model is too narrow for tensorParallelSize {size}")
    return Share(rank, size, heads, kv_heads, inner, vocabulary)


def split_evenly(total: int, rank: int, size: int) -> Span:
    """Part `rank` of `total`; the first parts are one longer where it does not divide."""
    each, longer = divmod(total, size)
    return Span(rank * each + min(rank, longer), each + (rank < longer))


def _split_heads(config: ModelConfig, rank: int, size: int) -> tuple[Span, Span]:
    groups, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
    if size <= groups:
        kv_heads = split_evenly(groups, rank, size)
        return kv_heads.times(group), kv_heads
    mine = rank * groups // size
    sharing = [other for other in range(size) if other * groups // size == mine]
    if len(sharing) > group:
        raise UnsupportedModelError(
            f"tensorParallelSize {size} leaves a rank without a head: this model has {groups} groups of {group}"
        )
    part = split_evenly(group, sharing.index(rank), len(sharing))
    return Span(mine * group + part.first, part.count), Span(mine, 1)


def _split_inner(width: int, rank: int, size: int) -> Span:
    """Equal parts of whole blocks where they divide, otherwise parts that differ by one narrow block."""
    for unit in _UNITS:
        if width % (unit * size) == 0:
            return split_evenly(width // unit, rank, size).times(unit)
    unit = next(unit for unit in (32, 2, 1) if unit == 1 or (width % unit == 0 and width // unit >= size))
    return split_evenly(width // unit, rank, size).times(unit)
