"""Choosing tokens on the device: truncation thresholds, and Gumbel-max over what they leave."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sort_key(x):
    """An int32 that orders as the float32 does; -0.0 comes just before 0.0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def key_value(key):
    """The float32 of a sort key."""
    key = key.to(tl.int32)
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def weigh_from(
    line, low, peak, sharpness, VOCABULARY: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """Number (COUNT) or probability weight of the logits whose sort key is at least `low`."""
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, VOCABULARY, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(line + column, mask=column < VOCABULARY, other=float("-inf"))
        kept = (sort_key(x) >= low) & (column < VOCABULARY)
        if COUNT:
            total += kept.to(tl.float32)
        else:
            total += tl.where(kept, tl.exp((x - peak) * sharpness), 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def raise_low(
    line, low, peak, sharpness, wanted, VOCABULARY: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """The highest sort key from which at least `wanted` is left, by bisection; `low` when nothing above it does."""
    high = sort_key(peak).to(tl.int64) + 1
    while high - low > 1:
        middle = (low + high) // 2
        enough = weigh_from(line, middle, peak, sharpness, VOCABULARY, COUNT, BLOCK) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def find_thresholds(
    logits, sharpness, top_k, top_p, min_p, thresholds, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per row: the smallest logit that min-p, top-k and top-p leave, in this order.

    `sharpness` is one over the temperature. Equal logits at the threshold are all kept. Rows without truncation
    get minus infinity.
    """
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * VOCABULARY
    sharp = tl.load(sharpness + row)
    best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for first in range(0, VOCABULARY, BLOCK):
        column = first + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(line + column, mask=column < VOCABULARY, other=float("-inf")))
    peak = tl.max(best, axis=0)
    share = tl.load(min_p + row)
    floor = tl.where(share > 0.0, peak + tl.log(tl.maximum(share, 1e-30)) / sharp, float("-inf"))
    low = sort_key(floor).to(tl.int64)
    count = tl.load(top_k + row)
    mass = tl.load(top_p + row)
    if peak > float("-inf"):
        if count > 0:
            low = raise_low(line, low, peak, sharp, count.to(tl.float32), VOCABULARY, True, BLOCK)
        if mass < 1.0:
            left = weigh_from(line, low, peak, sharp, VOCABULARY, False, BLOCK)
            low = raise_low(line, low, peak, sharp, mass * left, VOCABULARY, False, BLOCK)
    tl.store(thresholds + row, key_value(low))


@triton.jit
def gumbel_noise(seed, token, position):
    """Standard Gumbel noise fixed by (seed, position, token): Philox (Salmon et al., 2011) gives the bits.

    The upper tail comes from small uniform numbers, where float32 is fine enough for one in 2**32.
    """
    zero = token * 0
    bits, _, _, _ = tl.philox(seed, token, zero + position, zero, zero)
    uniform = (bits.to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    exponential = tl.where(
        uniform < 2.44140625e-4, uniform * (1.0 + 0.5 * uniform), -tl.log(tl.maximum(1.0 - uniform, 1e-7))
    )
    return -tl.log(exponential)


@triton.jit(do_not_specialize=["num_splits"])
def choose_tokens(
    logits,
    sharpness,
    thresholds,
    seeds,
    positions,
    best,
    ids,
    num_splits,
    VOCABULARY: tl.constexpr,
    RANDOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row and stretch of the vocabulary: its best value and the id, lowest id first among equals.

    With RANDOM a row whose sharpness is above zero takes the largest of `logit * sharpness + noise` among the logits
    at or above its threshold (Gumbel-max); others take the largest logit. A stretch with a NaN answers NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    line = logits + row * VOCABULARY
    stretch = tl.cdiv(tl.cdiv(VOCABULARY, BLOCK), num_splits) * BLOCK
    end = tl.minimum((split + 1) * stretch, VOCABULARY)
    if RANDOM:
        sharp = tl.load(sharpness + row)
        least = tl.load(thresholds + row)
        seed = tl.load(seeds + row)
        position = tl.load(positions + row).to(tl.int32)
    top = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    where = tl.zeros([BLOCK], dtype=tl.int32)
    broken = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(split * stretch, end, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(line + column, mask=column < end, other=float("-inf"))
        broken = tl.where(x != x, 1, broken)
        if RANDOM:
            noisy = tl.where(x >= least, x * sharp + gumbel_noise(seed, column, position), float("-inf"))
            x = tl.where(sharp > 0.0, noisy, x)
        better = x > top
        top = tl.where(better, x, top)
        where = tl.where(better, column, where)
    value = tl.max(top, axis=0)
    chosen = tl.min(tl.where(top == value, where, 2147483647), axis=0)
    value = tl.where(tl.max(broken, axis=0) > 0, float("nan"), value)
    tl.store(best + row * num_splits + split, value)
    tl.store(ids + row * num_splits + split, chosen)
