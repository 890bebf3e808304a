"""Programs that turn row ids into a step's inputs, so that the host sends only row ids, starts and offsets."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_rows(offsets, token, num_rows, STRIDE: tl.constexpr):
    """Index of the row each token belongs to: the last whose first token is not behind it."""
    low = tl.zeros_like(token)
    high = low + num_rows
    span = num_rows
    while span > 1:
        middle = (low + high) // 2
        after = tl.load(offsets + middle * STRIDE) > token
        high = tl.where(after, middle, high)
        low = tl.where(after, low, middle)
        span = (span + 1) // 2
    return low


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def gather_tokens(
    rows,
    starts,
    offsets,
    tokens,
    ids,
    positions,
    num_rows,
    num_tokens,
    TOKENS_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Ids and positions of a step's tokens; a padding row (id -1) gives token 0 at position 0."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    index = find_rows(offsets, tl.where(inside, token, 0), num_rows, 1)
    row = tl.load(rows + index)
    known = inside & (row >= 0)
    position = tl.load(starts + index) + token - tl.load(offsets + index)
    found = tl.load(tokens + row.to(tl.int64) * TOKENS_STRIDE + position, mask=known, other=0)
    tl.store(ids + token, found, mask=inside)
    tl.store(positions + token, tl.where(known, position, 0).to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def find_slots(
    rows,
    offsets,
    positions,
    tables,
    slots,
    num_rows,
    num_tokens,
    TABLE_STRIDE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Slot of each token in the cache, counted over all blocks; -1 for a padding row."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    index = find_rows(offsets, tl.where(inside, token, 0), num_rows, 1)
    row = tl.load(rows + index)
    known = inside & (row >= 0)
    position = tl.load(positions + token, mask=inside, other=0).to(tl.int32)
    block = tl.load(tables + row.to(tl.int64) * TABLE_STRIDE + position // BLOCK_TOKENS, mask=known, other=0)
    slot = block * BLOCK_TOKENS + position % BLOCK_TOKENS
    tl.store(slots + token, tl.where(known, slot, -1), mask=inside)
