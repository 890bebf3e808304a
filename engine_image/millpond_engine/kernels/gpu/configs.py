"""Which shape of each program runs: a fixed choice by model, device and batch, so that equal engines give equal tokens.

Every choice is compiled ahead of time in tests for each architecture and held to its registers and shared memory.
`benchmarks/gpu_kernels.py` times all of them on a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

from millpond_engine.kernels.gpu.launch import LaunchOptions
from millpond_engine.kernels.inputs import AttentionShape

MAX_SEGMENTS = 32
"""Most pieces one context is cut into."""
SEGMENT_TOKENS = 256
"""A context is not cut into pieces shorter than this."""
PROGRAMS_WANTED = 1024
"""Decode programs beyond this bring nothing: several waves of the largest devices."""
GATHER_BLOCK = 128
SAMPLING_BLOCK = 1024
MAX_SPLITS = 16
"""Most programs that share one row of the vocabulary."""


class Architecture(StrEnum):
    """What decides the form of a program."""

    AMPERE = "ampere"
    """NVIDIA before compute capability 9: products read registers, so wide blocks leave fewer for loads."""
    HOPPER = "hopper"
    """NVIDIA from compute capability 9 on."""
    CDNA = "cdna"
    """AMD with 64 KiB of shared memory."""


def detect_architecture(device: torch.device) -> Architecture:
    """The architecture of a device that is there."""
    if torch.version.hip is not None:
        return Architecture.CDNA
    major, _ = torch.cuda.get_device_capability(device)
    return Architecture.HOPPER if major >= 9 else Architecture.AMPERE


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """One compiled form of an attention program."""

    block_m: int
    """Queries times heads of a block."""
    tile: int
    """Context tokens of one turn; the same for all forms of a model, because it decides the rounding."""
    options: LaunchOptions


def pad(size: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(0, size - 1).bit_length()


def choose_tile(head_dim: int, dtype: torch.dtype) -> int:
    """Context tokens of one turn."""
    if dtype == torch.float32:
        return 32 if head_dim <= 128 else 16
    return 64 if head_dim <= 128 else 32


def chunk_configs(shape: AttentionShape, dtype: torch.dtype, *, arch: Architecture) -> list[AttentionConfig]:
    """All forms of the chunk program for a model, narrow to wide blocks of queries."""
    tile, least = choose_tile(shape.head_dim, dtype), max(16, pad(shape.group))
    if dtype == torch.float32:  # products run on the plain units: registers are the limit
        wide = [32] if shape.head_dim <= 128 else []
    else:
        wide = [64, 128] if shape.head_dim <= 128 else [64]
    sizes = [least, *(size for size in wide if size > least)]
    return [AttentionConfig(size, tile, _options(size, shape, dtype, arch=arch)) for size in sizes]


def choose_chunk_config(
    shape: AttentionShape, dtype: torch.dtype, *, arch: Architecture, tokens: int, rows: int
) -> AttentionConfig:
    """The widest form whose blocks the average row fills."""
    forms = chunk_configs(shape, dtype, arch=arch)
    filled = tokens * shape.group // max(1, rows)
    return next((form for form in reversed(forms) if form.block_m <= filled), forms[0])


def decode_config(shape: AttentionShape, dtype: torch.dtype, *, arch: Architecture) -> AttentionConfig:
    """The form of the decode program for a model."""
    least = max(16, pad(shape.group))
    return AttentionConfig(
        least, choose_tile(shape.head_dim, dtype), _options(least, shape, dtype, arch=arch)
    )


def segments_per_program(rows: int, num_kv_heads: int) -> int:
    """Consecutive segments that one decode program takes, a power of two: more when the batch fills the device."""
    programs = max(1, PROGRAMS_WANTED // max(1, rows * num_kv_heads))
    return MAX_SEGMENTS // min(MAX_SEGMENTS, 1 << (programs.bit_length() - 1))


def row_options(block: int) -> LaunchOptions:
    """Of a program that holds one row of `block` values in registers."""
    return LaunchOptions(num_warps=min(16, max(1, block // 512)))


def supports(shape: AttentionShape, dtype: torch.dtype) -> str | None:
    """Why the programs cannot run a model; None when they can."""
    if dtype not in {torch.float32, torch.float16, torch.bfloat16}:
        return f"dtype {dtype} is not float32, float16 or bfloat16"
    if shape.head_dim > 256 or shape.head_dim % 2:
        return f"head size {shape.head_dim} is odd or above 256"
    if shape.group > 64:
        return f"{shape.group} query heads share one key-value head; the most is 64"
    return None


def _options(block_m: int, shape: AttentionShape, dtype: torch.dtype, *, arch: Architecture) -> LaunchOptions:
    """Enough threads that accumulator and addresses fit their registers; what spilled was measured with ptxas."""
    most = 64 * 64 if arch is Architecture.AMPERE else 64 * 128
    num_warps = 8 if block_m * pad(shape.head_dim) > most else 4
    if arch is Architecture.CDNA:
        return LaunchOptions(num_warps, num_stages=1)
    if dtype == torch.float32 and shape.head_dim <= 64:
        return LaunchOptions(num_warps=4, num_stages=2)
    if dtype == torch.float32:
        return LaunchOptions(num_warps=8, num_stages=2 if block_m <= 16 else 1)
    if arch is Architecture.AMPERE and block_m >= 64:
        return LaunchOptions(num_warps, num_stages=2)
    return LaunchOptions(num_warps, num_stages=3)
