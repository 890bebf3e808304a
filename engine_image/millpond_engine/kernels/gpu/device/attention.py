"""Paged attention: one program for chunks over a paged prefix, one for decodes with split KV, and the merge.

A block of queries packs all query heads of one KV head, so that a product has at least 16 rows even for one
token. Softmax runs online in base 2 with float32 maximum, sum and accumulator (Dao et al., FlashAttention, 2022;
split KV: Flash-Decoding, 2023). Context is walked in tiles that start at position 0 whatever the chunk, and
segments are cut by a sequence's own length, so that a token's numbers do not depend on its batch mates.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend_tiles(
    acc,
    peak,
    total,
    q,
    visible,
    keys,
    values,
    table,
    first,
    last,
    limit,
    scale,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold the tiles [first, last) of a sequence's context into accumulator, maximum and sum of each query.

    `visible` is each query's last position; without MASKED all keys of the tiles are known to be visible.
    Nothing at or behind `limit` is read.
    """
    dim = tl.arange(0, DIM_PAD)
    for tile in range(first, last):
        position = tile * TILE + tl.arange(0, TILE)
        inside = position < limit
        block = tl.load(table + position // BLOCK_TOKENS, mask=inside, other=0).to(tl.int64)
        base = block * BLOCK_STRIDE + (position % BLOCK_TOKENS) * HEAD_DIM
        k = tl.load(
            keys + base[None, :] + dim[:, None], mask=inside[None, :] & (dim < HEAD_DIM)[:, None], other=0.0
        )
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if MASKED:
            scores = tl.where(position[None, :] <= visible[:, None], scores, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, axis=1))
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(peak - shift)
        total = total * fade + tl.sum(weights, axis=1)
        v = tl.load(
            values + base[:, None] + dim[None, :], mask=inside[:, None] & (dim < HEAD_DIM)[None, :], other=0.0
        )
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        peak = highest
    return acc, peak, total


@triton.jit
def count_segments(context, TILE: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENT_TILES: tl.constexpr):
    """How a context is cut: (tiles, tiles of one segment, segments); short ones are not cut below SEGMENT_TILES."""
    tiles = tl.cdiv(context, TILE)
    size = tl.maximum(tl.cdiv(tiles, SEGMENTS), SEGMENT_TILES)
    return tiles, size, tl.cdiv(tiles, size)


@triton.jit(do_not_specialize=["num_rows", "first_row"])
def attend_chunks(
    qkv,
    out,
    keys,
    values,
    rows,
    starts,
    offsets,
    tables,
    num_rows,
    first_row,
    scale,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program per block of queries and KV head, over rows [first_row, num_rows) of any query length.

    The grid holds tokens // BLOCK_Q + rows programs, which bounds the number of blocks without knowing lengths;
    row i's blocks start at (its first token) // BLOCK_Q + i. Programs without a block leave. The last blocks,
    which see the longest context, start first.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(1)
    wanted = tl.num_programs(0) - 1 - tl.program_id(0)
    origin = tl.load(offsets + first_row)
    low = 0
    high = num_rows - first_row
    while high - low > 1:
        middle = (low + high) // 2
        if (tl.load(offsets + first_row + middle) - origin) // BLOCK_Q + middle > wanted:
            high = middle
        else:
            low = middle
    index = first_row + low
    begin = tl.load(offsets + index)
    num_queries = tl.load(offsets + index + 1) - begin
    first_query = (wanted - (begin - origin) // BLOCK_Q - low) * BLOCK_Q
    if first_query >= num_queries:
        return

    packed = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, DIM_PAD)
    query = first_query + packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    real = (packed < BLOCK_Q * GROUP) & (query < num_queries)
    mask = real[:, None] & (dim < HEAD_DIM)[None, :]
    line = (begin + query).to(tl.int64)
    q_at = line * ((GROUP + 2) * NUM_KV_HEADS * HEAD_DIM) + head * HEAD_DIM
    q = tl.load(qkv + q_at[:, None] + dim[None, :], mask=mask, other=0.0)

    start = tl.load(starts + index)
    table = tables + tl.load(rows + index).to(tl.int64) * TABLE_STRIDE
    limit = start + tl.minimum(num_queries, first_query + BLOCK_Q)
    plain = (start + first_query + 1) // TILE  # tiles that every query of the block sees whole
    acc = tl.zeros([BLOCK_M, DIM_PAD], dtype=tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    head_at = kv_head * (BLOCK_TOKENS * HEAD_DIM)
    acc, peak, total = attend_tiles(
        acc, peak, total, q, start + query, keys + head_at, values + head_at, table, 0, plain, limit, scale,
        HEAD_DIM, DIM_PAD, BLOCK_TOKENS, BLOCK_STRIDE, TILE, False,
    )  # fmt: skip
    acc, peak, total = attend_tiles(
        acc, peak, total, q, start + query, keys + head_at, values + head_at, table, plain, tl.cdiv(limit, TILE),
        limit, scale, HEAD_DIM, DIM_PAD, BLOCK_TOKENS, BLOCK_STRIDE, TILE, True,
    )  # fmt: skip
    out_at = line * (GROUP * NUM_KV_HEADS * HEAD_DIM) + head * HEAD_DIM
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + out_at[:, None] + dim[None, :], result, mask=mask)


@triton.jit(do_not_specialize=["segments_each"])
def attend_decodes(
    qkv,
    out,
    partial,
    stats,
    keys,
    values,
    rows,
    starts,
    tables,
    segments_each,
    scale,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENT_TILES: tl.constexpr,
):
    """One program per row of one token, KV head and `segments_each` segments of its context.

    A context of one segment is finished here; of several, each leaves an unscaled accumulator in
    `partial [rows, heads, SEGMENTS, HEAD_DIM]` and maximum and sum in `stats [rows, heads, SEGMENTS, 2]`.
    How many segments a program takes changes the grid, not the numbers.
    """
    index = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.load(rows + index)
    if row < 0:
        return
    start = tl.load(starts + index)
    tiles, size, num_segments = count_segments(start + 1, TILE, SEGMENTS, SEGMENT_TILES)
    first_segment = tl.program_id(2) * segments_each
    if first_segment >= num_segments:
        return
    packed = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, DIM_PAD)
    mask = (packed < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    head = kv_head * GROUP + packed
    line = index.to(tl.int64)
    q_at = line * ((GROUP + 2) * NUM_KV_HEADS * HEAD_DIM) + head * HEAD_DIM
    q = tl.load(qkv + q_at[:, None] + dim[None, :], mask=mask, other=0.0)
    table = tables + row.to(tl.int64) * TABLE_STRIDE
    head_at = kv_head * (BLOCK_TOKENS * HEAD_DIM)
    visible = tl.zeros([BLOCK_M], dtype=tl.int32) + start
    for segment in range(first_segment, tl.minimum(first_segment + segments_each, num_segments)):
        acc = tl.zeros([BLOCK_M, DIM_PAD], dtype=tl.float32)
        peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        acc, peak, total = attend_tiles(
            acc, peak, total, q, visible, keys + head_at, values + head_at, table, segment * size,
            tl.minimum((segment + 1) * size, tiles), start + 1, scale,
            HEAD_DIM, DIM_PAD, BLOCK_TOKENS, BLOCK_STRIDE, TILE, True,
        )  # fmt: skip
        if num_segments == 1:
            out_at = line * (GROUP * NUM_KV_HEADS * HEAD_DIM) + head * HEAD_DIM
            result = (acc / total[:, None]).to(out.dtype.element_ty)
            tl.store(out + out_at[:, None] + dim[None, :], result, mask=mask)
        else:
            cell = (line * (GROUP * NUM_KV_HEADS) + head) * SEGMENTS + segment
            tl.store(partial + cell[:, None] * HEAD_DIM + dim[None, :], acc, mask=mask)
            tl.store(stats + cell * 2, peak, mask=packed < GROUP)
            tl.store(stats + cell * 2 + 1, total, mask=packed < GROUP)


@triton.jit
def merge_segments(
    out,
    partial,
    stats,
    rows,
    starts,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENT_TILES: tl.constexpr,
):
    """One program per row and query head: weigh its segments by their maxima; zeros for a padding row."""
    index = tl.program_id(0)
    head = tl.program_id(1)
    dim = tl.arange(0, DIM_PAD)
    cell = index.to(tl.int64) * NUM_HEADS + head
    if tl.load(rows + index) < 0:
        tl.store(out + cell * HEAD_DIM + dim, tl.zeros([DIM_PAD], out.dtype.element_ty), mask=dim < HEAD_DIM)
        return
    _, _, num_segments = count_segments(tl.load(starts + index) + 1, TILE, SEGMENTS, SEGMENT_TILES)
    if num_segments == 1:
        return
    segment = tl.arange(0, SEGMENTS)
    used = segment < num_segments
    peaks = tl.load(stats + (cell * SEGMENTS + segment) * 2, mask=used, other=float("-inf"))
    totals = tl.load(stats + (cell * SEGMENTS + segment) * 2 + 1, mask=used, other=0.0)
    factors = tl.exp2(peaks - tl.max(peaks, axis=0))
    parts = tl.load(
        partial + (cell * SEGMENTS + segment)[:, None] * HEAD_DIM + dim[None, :],
        mask=used[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    result = tl.sum(parts * factors[:, None], axis=0) / tl.sum(totals * factors, axis=0)
    tl.store(out + cell * HEAD_DIM + dim, result.to(out.dtype.element_ty), mask=dim < HEAD_DIM)
