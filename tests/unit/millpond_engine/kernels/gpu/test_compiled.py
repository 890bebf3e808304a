"""Every form of every kernel, compiled ahead of time: shared memory within each limit, nothing spilled.

The forms are collected from the host code itself, run on tensors without a device. A plain run compiles what
Llama-3.1-8B needs; MILLPOND_WIDE_SWEEP=1 (`make test-kernels`) adds other models, sizes and dtypes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from benchmarks import gpu_kernels
from tests.support.gpu_launches import SHARED_LIMITS, TARGETS, Launch, compile_launch, recorded_launches
from torch._subclasses.fake_tensor import FakeTensorMode

from millpond_engine.kernels.gpu import configs
from millpond_engine.kernels.gpu.attention import GpuAttention, gather_tokens
from millpond_engine.kernels.gpu.configs import Architecture
from millpond_engine.kernels.gpu.ops import GpuOps
from millpond_engine.kernels.gpu.sampling import DrawInputs, choose
from millpond_engine.kernels.inputs import AttentionShape, StepInputs

WIDE = bool(os.environ.get("MILLPOND_WIDE_SWEEP"))
REGISTERS = 65536
"""Of one NVIDIA multiprocessor, to be shared by the threads of a program."""


@dataclass(frozen=True)
class Model:
    name: str
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    vocabulary: int
    dtype: torch.dtype = torch.bfloat16
    block: int = 16
    head_norms: bool = False


LLAMA_8B = Model("llama-3.1-8b", 32, 8, 128, 4096, 14336, 128256)
MODELS = [
    LLAMA_8B,
    Model("smollm2-135m", 9, 3, 64, 576, 1536, 49152, block=32),
    Model("smollm2-135m-float32", 9, 3, 64, 576, 1536, 49152, torch.float32),
    Model("qwen3-0.6b", 16, 8, 128, 1024, 3072, 151936, head_norms=True),
    Model("qwen2.5-0.5b-float16", 14, 2, 64, 896, 4864, 151936, torch.float16),
    Model("mha", 16, 16, 128, 2048, 5632, 32000),
    Model("mqa-256", 8, 1, 256, 2048, 16384, 256000, block=32),
    Model("llama-8b-float32", 32, 8, 128, 4096, 14336, 128256, torch.float32),
    Model("mqa-256-float32", 8, 1, 256, 2048, 16384, 256000, torch.float32),
    Model("head-80", 32, 32, 80, 2560, 6912, 50304),
    Model("llama-70b", 64, 8, 128, 8192, 28672, 128256),
]


ARCHITECTURES = {
    "sm_80": Architecture.AMPERE,
    "sm_90": Architecture.HOPPER,
    "sm_100": Architecture.HOPPER,
    "gfx942": Architecture.CDNA,
}


def collect(model: Model, arch: Architecture) -> list[Launch]:
    """Run the host code over batches that reach every form."""
    with FakeTensorMode(), recorded_launches() as found:
        _run_attention(model, arch)
        _run_ops(model)
    return list(dict.fromkeys(found))


def _run_attention(model: Model, arch: Architecture) -> None:
    shape = AttentionShape(2, model.heads, model.kv_heads, model.head_dim, model.block, 1e-6)
    cache = torch.empty(shape.cache_shape(64), dtype=model.dtype, device="cuda")
    rope = torch.empty(4096, 2, model.head_dim // 2, device="cuda")
    attention = GpuAttention(shape, cache, rope, max_decodes=64, arch=arch)
    norm = torch.empty(model.head_dim, dtype=model.dtype, device="cuda")
    table = torch.empty(64, 4097, dtype=torch.int32, device="cuda")
    filled = [2 * size // shape.group for size in (16, 32, 64, 128, 4096)]  # queries of two rows
    batches = [
        (1, 1, 1),
        (64, 64, 64),
        (64, 64, 0),
        (10, 8 + filled[2], 8),
        *((2, size, 0) for size in filled),
    ]
    for rows, tokens, decodes in batches:
        inputs = StepInputs(
            rows=torch.empty(rows, dtype=torch.int32, device="cuda"),
            starts=torch.empty(rows, dtype=torch.int32, device="cuda"),
            query_offsets=torch.empty(rows + 1, dtype=torch.int32, device="cuda"),
            positions=torch.empty(tokens, dtype=torch.int64, device="cuda"),
            block_tables=torch.empty(64, 256, dtype=torch.int32, device="cuda"),
            num_tokens=tokens,
            num_decodes=decodes,
        )
        gather_tokens(
            table, rows=inputs.rows, starts=inputs.starts, offsets=inputs.query_offsets, num_tokens=tokens
        )
        attention.bind(inputs)
        for layer in range(2):
            qkv = torch.empty(tokens, shape.qkv_size, dtype=model.dtype, device="cuda")
            out = attention(layer, qkv, (norm, norm) if model.head_norms else None)
            assert out.shape == (tokens, model.heads * model.head_dim)


def _run_ops(model: Model) -> None:
    ops, dtype = GpuOps(), model.dtype
    weight = torch.empty(model.hidden, dtype=dtype, device="cuda")
    residual = ops.embed(
        torch.empty(7, dtype=torch.int32, device="cuda"),
        torch.empty(model.vocabulary, model.hidden, dtype=dtype, device="cuda"),
    )
    normed = ops.rms_norm(residual, weight, 1e-5)
    gated = ops.gated(normed, torch.empty(2 * model.inner, model.hidden, dtype=dtype, device="cuda"))
    ops.linear_add(gated, torch.empty(model.hidden, model.inner, dtype=dtype, device="cuda"), residual)
    ops.rms_norm(residual, weight, 1e-5)
    logits = torch.empty(7, model.vocabulary, device="cuda")
    numbers = torch.empty(7, device="cuda")
    counts = torch.empty(7, dtype=torch.int64, device="cuda")
    choose(logits)
    choose(logits, DrawInputs(numbers, counts, counts, counts, numbers, numbers))


JOBS = [(model, target) for model in (MODELS if WIDE else [LLAMA_8B]) for target in TARGETS]


@pytest.mark.parametrize(("model", "target"), JOBS, ids=lambda value: getattr(value, "name", value))
def test_every_form_fits_its_architecture(model: Model, target: str) -> None:
    launches = collect(model, ARCHITECTURES[target])
    if not WIDE and target != "sm_90":  # the small programs differ little between these
        launches = [launch for launch in launches if launch.name.startswith("attend")]
    too_much = []
    for launch in launches:
        compiled = compile_launch(launch, target)
        if (
            compiled.spilled
            or compiled.shared_bytes > SHARED_LIMITS[target]
            or (not target.startswith("gfx") and compiled.registers * compiled.threads > REGISTERS)
        ):
            too_much.append(f"{launch}: {compiled}")
    assert not too_much, "\n".join(too_much)


@pytest.mark.parametrize("arch", Architecture)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_host_code_reaches_every_form(model: Model, arch: Architecture) -> None:
    launches = collect(model, arch)
    assert {launch.name for launch in launches} == {
        "add_rms_norm",
        "attend_chunks",
        "attend_decodes",
        "choose_tokens",
        "find_slots",
        "find_thresholds",
        "gather_tokens",
        "merge_segments",
        "rotate_and_store",
        "silu_mul",
    }
    shape = AttentionShape(2, model.heads, model.kv_heads, model.head_dim, model.block, 1e-6)
    expected = {form.block_m for form in configs.chunk_configs(shape, model.dtype, arch=arch)}
    assert {dict(x.constants)["BLOCK_M"] for x in launches if x.name == "attend_chunks"} == expected
    assert len(launches) == len(expected) + 11  # two forms of the norm and of the choice, one of the others


def test_the_benchmark_measures_every_form() -> None:
    """Its host code on tensors without content: what it times can only be seen on a device."""
    arch = Architecture.HOPPER
    with FakeTensorMode(), recorded_launches() as launches:
        figures = gpu_kernels.run(torch.device("cuda", 0), arch, _call_once)
    forms = configs.chunk_configs(gpu_kernels.SHAPE, gpu_kernels.DTYPE, arch=arch)
    assert len(figures) == 2 + len(gpu_kernels.DECODES) + len(gpu_kernels.CHUNKS) * (1 + len(forms))
    used = {dict(x.constants)["BLOCK_M"] for x in launches if x.name == "attend_chunks"}
    assert used == {form.block_m for form in forms}


def _call_once(call: Callable[[], object]) -> float:
    call()
    return 1.0
