"""Attention kernels on a GPU, every form, against what the device can do.

    python -m benchmarks.gpu_kernels [--json FILE]

Llama-3.1-8B's attention (32 heads, 8 KV heads of 128, bfloat16) over random caches. Decodes are measured against a
device-to-device copy, chunks against a large matrix product, both timed in the same run. Prints ratios.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from benchmarks.figures import Figure, compare, report

from millpond_engine.kernels.gpu import attention as host
from millpond_engine.kernels.gpu import configs
from millpond_engine.kernels.gpu.attention import GpuAttention
from millpond_engine.kernels.inputs import AttentionShape, StepInputs

SHAPE = AttentionShape(1, 32, 8, 128, 16, norm_eps=1e-5)
DTYPE = torch.bfloat16
DECODES = ((1, 2048), (1, 32768), (16, 2048), (64, 2048), (256, 1024))
"""rows, context tokens of each"""
CHUNKS = ((1, 0, 2048), (1, 8192, 2048), (8, 0, 256), (32, 1024, 16))
"""rows, context tokens before the chunk, tokens of the chunk"""


DECODE_GOAL, CHUNK_GOAL = 0.85, 0.70
"""Of the device's own copy rate, and of its own matrix product's."""


def main() -> int:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    return report(run(device, configs.detect_architecture(device), time_call), arguments.json)


def run(
    device: torch.device, arch: configs.Architecture, timer: Callable[[Callable[[], object]], float]
) -> list[Figure]:
    """All measurements; `timer` returns the seconds of one call."""
    copied = torch.empty(1 << 30, dtype=torch.int8, device=device)
    target = torch.empty_like(copied)
    copy_rate = 2 * copied.nbytes / timer(lambda: target.copy_(copied)) / 1e9
    square = torch.randn(8192, 8192, dtype=DTYPE, device=device)
    product_rate = 2 * 8192**3 / timer(lambda: square @ square) / 1e12
    figures = [Figure("device copy", copy_rate, "GB/s"), Figure("matrix product", product_rate, "TFLOP/s")]
    for rows, context in DECODES:
        call = make_call(device, arch, rows=rows, start=context - 1, tokens=1)
        read = 2 * rows * context * SHAPE.num_kv_heads * SHAPE.head_dim * DTYPE.itemsize
        rate = read / timer(call) / 1e9
        figures.append(
            compare(f"decode {rows} x {context}", rate, "GB/s", peer=copy_rate, at_least=DECODE_GOAL)
        )
    for rows, start, tokens in CHUNKS:
        call = make_call(device, arch, rows=rows, start=start, tokens=tokens)
        pairs = rows * (start * tokens + tokens * (tokens + 1) // 2)
        work = 4 * pairs * SHAPE.num_heads * SHAPE.head_dim / 1e12
        what, rate = f"chunk {rows} x {tokens} behind {start}", work / timer(call)
        figures.append(compare(what, rate, "TFLOP/s", peer=product_rate, at_least=CHUNK_GOAL))
        for form in configs.chunk_configs(SHAPE, DTYPE, arch=arch):
            name = f"{what}, block {form.block_m}, {form.options.num_warps} warps"
            rate = work / time_form(timer, call, form)
            figures.append(Figure(name, rate, "TFLOP/s", product_rate, rate / product_rate))
    return figures


def make_call(
    device: torch.device, arch: configs.Architecture, *, rows: int, start: int, tokens: int
) -> Callable[[], torch.Tensor]:
    """One layer's attention of a batch whose rows are alike, blocks in random order."""
    per_row = -(-(start + tokens) // SHAPE.block_tokens)
    cache = torch.randn(SHAPE.cache_shape(rows * per_row), dtype=DTYPE, device=device)
    rope = torch.rand(start + tokens, 2, SHAPE.head_dim // 2, device=device)
    attention = GpuAttention(SHAPE, cache, rope, max_decodes=rows, arch=arch)
    index = torch.arange(rows, dtype=torch.int32, device=device)
    attention.bind(
        StepInputs(
            rows=index,
            starts=torch.full_like(index, start),
            query_offsets=torch.arange(rows + 1, dtype=torch.int32, device=device) * tokens,
            positions=torch.arange(start, start + tokens, device=device).repeat(rows),
            block_tables=torch.randperm(rows * per_row, device=device).reshape(rows, per_row).int(),
            num_tokens=rows * tokens,
            num_decodes=rows if tokens == 1 else 0,
        )
    )
    qkv = torch.randn(rows * tokens, SHAPE.qkv_size, dtype=DTYPE, device=device)
    return lambda: attention(0, qkv, None)


def time_form(
    timer: Callable[[Callable[[], object]], float],
    call: Callable[[], object],
    form: configs.AttentionConfig,
) -> float:
    """Seconds of a call with one form in place of the chosen one."""
    plain = host.choose_chunk_config
    host.choose_chunk_config = lambda *args, **kwargs: form
    try:
        return timer(call)
    finally:
        host.choose_chunk_config = plain


def time_call(call: Callable[[], object]) -> float:
    """Median seconds of a call, by the device's clock, over 20 runs with the cache of the device flushed before each."""
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(25):
        flush.zero_()
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        call()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) / 1000)
    return float(statistics.median(times[5:]))


if __name__ == "__main__":
    raise SystemExit(main())
