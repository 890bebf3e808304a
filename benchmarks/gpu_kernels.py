"""Attention kernels on a GPU, every form, against what the device can do.

    python benchmarks/gpu_kernels.py [--json FILE]

Llama-3.1-8B's attention (32 heads, 8 KV heads of 128, bfloat16) over random caches. Decodes are measured against a
device-to-device copy, chunks against a large matrix product, both timed in the same run. Prints ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

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


@dataclass(frozen=True)
class Figure:
    """One measurement; `share` is of the device's own copy or product rate."""

    what: str
    form: str
    microseconds: float
    share: float


def main() -> int:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda")
    report = {"device": torch.cuda.get_device_name(device), "torch": torch.__version__}
    figures = run(device, configs.detect_architecture(device), time_call)
    print(*(f"{key}: {value}" for key, value in report.items()), sep="\n")
    for figure in figures:
        print(f"{figure.what:44} {figure.form:28} {figure.microseconds:9.1f} us  {figure.share:6.1%}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report | {"figures": [asdict(f) for f in figures]}, indent=1))
    return 0


def run(
    device: torch.device, arch: configs.Architecture, timer: Callable[[Callable[[], object]], float]
) -> list[Figure]:
    """All measurements; `timer` returns the seconds of one call."""
    copied = torch.empty(1 << 30, dtype=torch.int8, device=device)
    target = torch.empty_like(copied)
    bytes_rate = 2 * copied.nbytes / timer(lambda: target.copy_(copied))
    square = torch.randn(8192, 8192, dtype=DTYPE, device=device)
    flop_rate = 2 * 8192**3 / timer(lambda: square @ square)
    figures = [
        Figure("device copy", f"{bytes_rate / 1e9:.0f} GB/s", 0.0, 1.0),
        Figure("matrix product", f"{flop_rate / 1e12:.0f} TFLOP/s", 0.0, 1.0),
    ]
    for rows, context in DECODES:
        call = make_call(device, arch, rows=rows, start=context - 1, tokens=1)
        seconds = timer(call)
        read = 2 * rows * context * SHAPE.num_kv_heads * SHAPE.head_dim * DTYPE.itemsize
        share = read / seconds / bytes_rate
        figures.append(Figure(f"decode {rows} x {context}", "split", seconds * 1e6, share))
    for rows, start, tokens in CHUNKS:
        call = make_call(device, arch, rows=rows, start=start, tokens=tokens)
        for form in configs.chunk_configs(SHAPE, DTYPE, arch=arch):
            call = make_call(device, arch, rows=rows, start=start, tokens=tokens)
            seconds = time_form(timer, call, form)
            pairs = rows * (start * tokens + tokens * (tokens + 1) // 2)
            share = 4 * pairs * SHAPE.num_heads * SHAPE.head_dim / seconds / flop_rate
            what = f"chunk {rows} x {tokens} behind {start}"
            figures.append(
                Figure(what, f"block {form.block_m}, {form.options.num_warps} warps", seconds * 1e6, share)
            )
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
