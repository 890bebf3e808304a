"""Row-wise programs: residual add with root-mean-square norm, and the gate of the feed-forward layer."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_rms_norm(
    residual, delta, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr
):
    """One program per token: `residual += delta` if ADD, then `out = norm(residual) * weight`; sums in float32."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    x = tl.load(residual + row + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(delta + row + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + row + column, x.to(residual.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    factors = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + column, (x * scale * factors).to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One program per token and stretch of columns: `out = silu(gate) * up`, gates left of ups in each row."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    source = gate_up + token * (2 * WIDTH) + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out + token * WIDTH + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside
    )
