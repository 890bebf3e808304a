"""Head norms, rotation and cache write of one token in one pass."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotate_and_store(
    qkv,
    positions,
    slots,
    rope,
    keys,
    values,
    query_norm,
    key_norm,
    eps,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    NORMS: tl.constexpr,
):
    """One program per token and KV head: rotate its queries in place, write its key and value to the cache.

    `rope` holds cosines and sines `[positions, 2, HEAD_DIM / 2]`; dimension i is paired with i + HEAD_DIM / 2.
    A slot of -1 writes nothing.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    half = tl.arange(0, HALF_PAD)
    narrow = half < HALF
    angles = rope + tl.load(positions + token) * HEAD_DIM + half
    cos = tl.load(angles, mask=narrow, other=0.0)
    sin = tl.load(angles + HALF, mask=narrow, other=0.0)
    line = qkv + token * ((GROUP + 2) * NUM_KV_HEADS * HEAD_DIM)

    member = tl.arange(0, GROUP_PAD)
    wanted = (member < GROUP)[:, None] & narrow[None, :]
    queries = line + (kv_head * GROUP + member)[:, None] * HEAD_DIM + half[None, :]
    low = tl.load(queries, mask=wanted, other=0.0).to(tl.float32)
    high = tl.load(queries + HALF, mask=wanted, other=0.0).to(tl.float32)
    if NORMS:
        scale = tl.rsqrt(tl.sum(low * low + high * high, axis=1) / HEAD_DIM + eps)[:, None]
        low *= scale * tl.load(query_norm + half, mask=narrow, other=0.0).to(tl.float32)[None, :]
        high *= scale * tl.load(query_norm + HALF + half, mask=narrow, other=0.0).to(tl.float32)[None, :]
    dtype = qkv.dtype.element_ty
    tl.store(queries, (low * cos[None, :] - high * sin[None, :]).to(dtype), mask=wanted)
    tl.store(queries + HALF, (high * cos[None, :] + low * sin[None, :]).to(dtype), mask=wanted)

    slot = tl.load(slots + token)
    stored = narrow & (slot >= 0)
    key = line + (GROUP * NUM_KV_HEADS + kv_head) * HEAD_DIM + half
    low_key = tl.load(key, mask=stored, other=0.0).to(tl.float32)
    high_key = tl.load(key + HALF, mask=stored, other=0.0).to(tl.float32)
    if NORMS:
        key_scale = tl.rsqrt(tl.sum(low_key * low_key + high_key * high_key, axis=0) / HEAD_DIM + eps)
        low_key *= key_scale * tl.load(key_norm + half, mask=narrow, other=0.0).to(tl.float32)
        high_key *= key_scale * tl.load(key_norm + HALF + half, mask=narrow, other=0.0).to(tl.float32)
    target = (slot // BLOCK_TOKENS).to(tl.int64) * BLOCK_STRIDE
    target += (kv_head * BLOCK_TOKENS + slot % BLOCK_TOKENS) * HEAD_DIM + half
    tl.store(keys + target, (low_key * cos - high_key * sin).to(dtype), mask=stored)
    tl.store(keys + target + HALF, (high_key * cos + low_key * sin).to(dtype), mask=stored)
    value = key + NUM_KV_HEADS * HEAD_DIM
    tl.store(values + target, tl.load(value, mask=stored, other=0.0), mask=stored)
    tl.store(values + target + HALF, tl.load(value + HALF, mask=stored, other=0.0), mask=stored)
