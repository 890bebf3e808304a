"""Make the torch runner from a configuration: open the model, size the pool, read the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from millpond_common.contract.engine_config import EngineConfig
from millpond_engine.engine.runner import Runner, RunnerInfo
from millpond_engine.kernels.inputs import AttentionShape
from millpond_engine.model.config import ModelConfig
from millpond_engine.model.decoder import Decoder
from millpond_engine.model.load import choose_dtype, load_weights, open_model
from millpond_engine.model.rope import compute_inverse_frequencies, make_rope_table
from millpond_engine.runner.backend import choose_backend
from millpond_engine.runner.cuda_device import find_gpu
from millpond_engine.runner.kv_cache import KvCache
from millpond_engine.runner.memory import AvailableMemory, PoolSize, compute_pool_size, read_available_memory
from millpond_engine.runner.rows import RowTable
from millpond_engine.runner.torch_runner import TorchRunner

ProgressLine = Callable[[int, int], None]
"""Called with (loaded bytes, total bytes)."""


def make_torch_runner(config: EngineConfig, *, progress: ProgressLine | None = None) -> Runner:
    """Load the model that the configuration names.

    Raises:
        ModelError: the model cannot be read or run.
        DeviceUnavailableError: a GPU is asked for, and it or its compiler is missing.
        PoolTooSmallError: no KV block fits.
    """
    device = choose_device(config.device)
    opened = open_model(Path(config.model_path))
    report = None if progress is None else lambda step: progress(step.loaded_bytes, step.total_bytes)
    if device.type == "cuda":
        gpu = find_gpu()
        # here, because importing it needs Triton, which the CPU image lacks
        from millpond_engine.runner.cuda_load import make_cuda_runner  # noqa: PLC0415

        return make_cuda_runner(config, opened, gpu, progress=report)
    model_config = opened.config
    dtype = choose_dtype(config.dtype, model_config, device)
    shape = make_attention_shape(model_config, config.kv_cache.block_tokens)
    backend = choose_backend(model_config, shape, dtype, device)
    model = load_weights(opened, backend.ops, dtype=dtype, device=device, progress=report)
    max_tokens = min(config.max_model_tokens, model_config.max_position_tokens)
    pool = _size_pool(config, shape, dtype, max_tokens)
    cache = KvCache(
        shape,
        num_blocks=pool.num_blocks,
        num_host_blocks=_host_blocks(config, shape, dtype),
        dtype=dtype,
        device=device,
    )
    attention = backend.make_attention(
        cache.device_blocks, make_rope(model_config, model, max_tokens).to(device)
    )
    info = make_info(
        model_config,
        config,
        shape=shape,
        dtype=dtype,
        device=device,
        pool=pool,
        cache=cache,
        max_tokens=max_tokens,
    )
    rows = RowTable(max_tokens=max_tokens, block_tokens=config.kv_cache.block_tokens)
    return TorchRunner(info=info, model=model, attention=attention, cache=cache, rows=rows)


def choose_device(wanted: str) -> torch.device:
    """Turn the configured device into torch's; `Auto` takes a GPU when there is one."""
    if wanted == "Cuda" or (wanted == "Auto" and torch.cuda.is_available()):
        return torch.device("cuda")
    return torch.device("cpu")


def make_attention_shape(config: ModelConfig, block_tokens: int) -> AttentionShape:
    """Constants of attention for a model and a block size."""
    return AttentionShape(
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_tokens=block_tokens,
        norm_eps=config.norm_eps,
    )


def bytes_per_block(shape: AttentionShape, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.block_tokens * shape.head_dim * dtype.itemsize


def _host_blocks(config: EngineConfig, shape: AttentionShape, dtype: torch.dtype) -> int:
    return config.kv_cache.host_bytes // bytes_per_block(shape, dtype)


def _size_pool(config: EngineConfig, shape: AttentionShape, dtype: torch.dtype, max_tokens: int) -> PoolSize:
    blocks_per_sequence = -(-max_tokens // shape.block_tokens)
    memory = read_available_memory()
    host = (
        config.kv_cache.host_bytes
    )  # the same memory as the device's here, and promised to swapped sequences
    return compute_pool_size(
        bytes_per_block=bytes_per_block(shape, dtype),
        block_tokens=shape.block_tokens,
        device_bytes=config.kv_cache.device_bytes,
        available=AvailableMemory(max(0, memory.bytes - host), memory.source),
        useful_blocks=config.scheduling.max_sequences * blocks_per_sequence,
    )


def make_rope(config: ModelConfig, model: Decoder, max_tokens: int) -> torch.Tensor:
    """Cosines and sines of a loaded model, `[max_tokens, 2, head_dim / 2]` on the CPU."""
    inverse, factor = compute_inverse_frequencies(
        config.rope, config.head_dim, max_tokens, model.rope_divisors
    )
    return make_rope_table(inverse, factor, max_tokens)


def make_info(
    model: ModelConfig,
    config: EngineConfig,
    *,
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    pool: PoolSize,
    cache: KvCache,
    max_tokens: int,
) -> RunnerInfo:
    """Facts about a loaded model and its cache."""
    return RunnerInfo(
        model=f"{model.name} ({model.family}, {model.num_layers} layers, hidden {model.hidden_size})",
        vocabulary_size=model.vocabulary_size,
        max_model_tokens=max_tokens,
        block_tokens=config.kv_cache.block_tokens,
        num_blocks=pool.num_blocks,
        num_host_blocks=cache.host_blocks.shape[0],
        bytes_per_block=bytes_per_block(shape, dtype),
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        eos_token_ids=model.eos_token_ids,
        limited_by=pool.limited_by,
        copy_bytes_per_second=cache.measure_copy_bandwidth(),
    )
