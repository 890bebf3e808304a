"""How many KV blocks fit on a GPU: measured, then decided."""

from __future__ import annotations

from collections.abc import Callable

import torch

from millpond_engine.runner.memory import PoolSize, PoolTooSmallError, format_bytes


def compute_device_pool(
    *,
    free_bytes: int,
    activation_bytes: int,
    percent: int,
    bytes_per_block: int,
    block_tokens: int,
    device_bytes: int | None,
    useful_blocks: int,
) -> PoolSize:
    """Choose the number of blocks.

    `free_bytes` is free after weights, `activation_bytes` what the largest step needs on top. Without
    `device_bytes` the pool gets `percent` of the free memory less the activations; graphs and fragments live in
    the rest. `useful_blocks` is what the most sequences at full length could ever fill; more would lie idle.

    Raises:
        PoolTooSmallError: not one block fits.
    """
    budget = free_bytes * percent // 100 - activation_bytes
    reason = (
        f"{percent} % of the {format_bytes(free_bytes)} that the weights leave on the device, less "
        f"{format_bytes(activation_bytes)} for the largest step"
    )
    if device_bytes is not None:
        budget, reason = device_bytes, f"kvCache.deviceBytes of {format_bytes(device_bytes)}"
    num_blocks = max(0, budget) // bytes_per_block
    if num_blocks > useful_blocks and device_bytes is None:
        num_blocks = useful_blocks
        reason = f"maxSequences at full length need no more than {useful_blocks} blocks"
    if num_blocks < 1:
        raise PoolTooSmallError(
            f"no KV block of {format_bytes(bytes_per_block)} ({block_tokens} tokens) fits: limited by {reason}; lower "
            "scheduling.maxBatchTokens, raise kvCache.devicePercent or take a device with more memory"
        )
    return PoolSize(num_blocks, reason)


def measure_activations(device: torch.device, largest_step: Callable[[], object]) -> tuple[int, int]:
    """Run the largest step; returns (bytes it took at its peak, bytes free on the device without them)."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    largest_step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return peak, free
