"""Copies between blocks and tiers."""

from __future__ import annotations

import pytest
import torch

from millpond_engine.kernels.inputs import AttentionShape
from millpond_engine.records.step import BlockCopy, BlockMove
from millpond_engine.runner.kv_cache import KvCache, merge_runs


@pytest.fixture
def cache() -> KvCache:
    shape = AttentionShape(2, 4, 2, 8, 4, 1e-6)
    made = KvCache(shape, num_blocks=6, num_host_blocks=4, dtype=torch.float32, device=torch.device("cpu"))
    for block in range(6):
        made.device_blocks[block] = block
    return made


def _values(blocks: torch.Tensor) -> list[float]:
    assert all(bool((block == block.flatten()[0]).all()) for block in blocks)
    return [float(block.flatten()[0]) for block in blocks]


def test_copies_read_all_sources_before_any_is_written(cache: KvCache) -> None:
    cache.copy((BlockCopy(0, 1), BlockCopy(1, 2), BlockCopy(2, 0)))
    assert _values(cache.device_blocks) == [2, 0, 1, 3, 4, 5]


def test_swapped_blocks_come_back_elsewhere(cache: KvCache) -> None:
    cache.swap_out((BlockMove(1, 2), BlockMove(2, 3), BlockMove(5, 0)))
    cache.poison((1, 2, 5))
    assert torch.isnan(cache.device_blocks[[1, 2, 5]]).all()
    cache.swap_in((BlockMove(0, 2), BlockMove(2, 3), BlockMove(1, 0)))
    assert _values(cache.device_blocks[:3]) == [1, 5, 2]


def test_neighbouring_moves_become_one_run() -> None:
    moves = (BlockMove(4, 0), BlockMove(5, 1), BlockMove(6, 2), BlockMove(8, 3), BlockMove(9, 5))
    assert merge_runs(moves) == [(4, 0, 3), (8, 3, 1), (9, 5, 1)]


def test_the_copy_bandwidth_is_measured(cache: KvCache) -> None:
    before = cache.device_blocks.clone()
    assert cache.measure_copy_bandwidth() > 0
    assert torch.equal(cache.device_blocks, before)
