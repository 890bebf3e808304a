"""Load one rank's share of a model and make its runner: open the files, read the weights, size the pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from millpond_common.contract.engine_config import EngineConfig
from millpond_engine.engine.runner import Runner, RunnerInfo
from millpond_engine.kernels.inputs import AttentionShape
from millpond_engine.model.config import ModelConfig
from millpond_engine.model.decoder import Decoder
from millpond_engine.model.load import OpenedModel, choose_dtype, load_weights, open_model
from millpond_engine.model.rope import compute_inverse_frequencies, make_rope_table
from millpond_engine.model.source import ProgressCallback
from millpond_engine.model.split import Share, compute_share
from millpond_engine.runner.backend import Backend, choose_backend
from millpond_engine.runner.cuda_device import find_gpu
from millpond_engine.runner.group import RankGroup
from millpond_engine.runner.kv_cache import KvCache
from millpond_engine.runner.memory import (
    AvailableMemory,
    PoolSize,
    check_weights_fit,
    compute_pool_size,
    read_available_memory,
)
from millpond_engine.runner.rows import RowTable
from millpond_engine.runner.torch_runner import TorchRunner

ProgressLine = Callable[[int, int], None]
"""Called with (loaded bytes, total bytes)."""


class LoadedRank(Protocol):
    """A rank's share of the weights on its device, before there is a cache."""

    @property
    def device(self) -> torch.device:
        """Where it is."""
        ...

    def finish(self, group: RankGroup) -> Runner:
        """Agree with the other ranks on the pool, and make the runner of this rank."""
        ...


def load_rank(
    config: EngineConfig, *, rank: int = 0, size: int = 1, progress: ProgressLine | None = None
) -> tuple[LoadedRank, Share]:
    """Read one rank's share of the model that the configuration names.

    Raises:
        ModelError: the model cannot be read or run.
        DeviceUnavailableError: a GPU is asked for, and it or its compiler is missing.
    """
    device = choose_device(config.device)
    opened = open_model(Path(config.model_path))
    share = compute_share(opened.config, rank, size)
    report = None if progress is None else lambda step: progress(step.loaded_bytes, step.total_bytes)
    if device.type == "cuda":
        gpu = find_gpu(rank, size)
        # here, because importing it needs Triton, which the CPU image lacks
        from millpond_engine.runner.cuda_load import load_cuda_rank  # noqa: PLC0415

        return load_cuda_rank(config, opened, gpu, share=share, progress=report), share
    return _load_cpu_rank(config, opened, share, report), share


@dataclass(frozen=True, slots=True)
class CpuRank:
    """A rank on the CPU."""

    config: EngineConfig
    model: Decoder
    backend: Backend
    dtype: torch.dtype
    max_tokens: int

    @property
    def device(self) -> torch.device:
        """The machine's memory."""
        return torch.device("cpu")

    def finish(self, group: RankGroup) -> Runner:
        """Size the pool for all ranks together and make the runner of this one."""
        config, shape, device = self.config, self.backend.shape, self.device
        group.split(self.model)
        block_bytes = sum(group.exchange(bytes_per_block(shape, self.dtype)))  # one memory holds all ranks
        pool = group.agree_on_pool(lambda: self._size_pool(block_bytes))
        cache = KvCache(
            shape,
            num_blocks=pool.num_blocks,
            num_host_blocks=config.kv_cache.host_bytes // block_bytes,
            dtype=self.dtype,
            device=device,
        )
        attention = self.backend.make_attention(
            cache.device_blocks, make_rope(self.model.config, self.model, self.max_tokens)
        )
        info = make_info(
            self.model.config,
            config,
            shape=shape,
            dtype=self.dtype,
            device=device,
            pool=pool,
            cache=cache,
            max_tokens=self.max_tokens,
            group=group,
        )
        rows = RowTable(max_tokens=self.max_tokens, block_tokens=config.kv_cache.block_tokens)
        return TorchRunner(info=info, model=self.model, attention=attention, cache=cache, rows=rows)

    def _size_pool(self, block_bytes: int) -> PoolSize:
        config, block_tokens = self.config, self.backend.shape.block_tokens
        memory = read_available_memory()
        host = config.kv_cache.host_bytes  # the same memory here, and promised to swapped sequences
        return compute_pool_size(
            bytes_per_block=block_bytes,
            block_tokens=block_tokens,
            device_bytes=config.kv_cache.device_bytes,
            available=AvailableMemory(max(0, memory.bytes - host), memory.source),
            useful_blocks=config.scheduling.max_sequences * -(-self.max_tokens // block_tokens),
        )


def _load_cpu_rank(
    config: EngineConfig, opened: OpenedModel, share: Share, progress: ProgressCallback | None
) -> CpuRank:
    device, mine = torch.device("cpu"), share.narrow(opened.config)
    dtype = choose_dtype(config.dtype, mine, device)
    shape = make_attention_shape(mine, config.kv_cache.block_tokens)
    backend = choose_backend(mine, shape, dtype, device)
    ranks = [compute_share(opened.config, rank, share.size) for rank in range(share.size)]
    count = sum(rank.count_weights(opened.config, packed_head=True) for rank in ranks)
    check_weights_fit(count * dtype.itemsize, read_available_memory())  # one memory holds all ranks
    model = load_weights(opened, backend.ops, dtype=dtype, device=device, share=share, progress=progress)
    return CpuRank(config, model, backend, dtype, min(config.max_model_tokens, mine.max_position_tokens))


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
    group: RankGroup,
) -> RunnerInfo:
    """Facts about a loaded model and its cache, which all ranks share."""
    block_bytes, copy_rate = group.agree_on_copies(
        bytes_per_block(shape, dtype), cache.measure_copy_bandwidth()
    )
    return RunnerInfo(
        model=f"{model.name} ({model.family}, {model.num_layers} layers, hidden {model.hidden_size})",
        vocabulary_size=model.vocabulary_size,
        max_model_tokens=max_tokens,
        block_tokens=config.kv_cache.block_tokens,
        num_blocks=pool.num_blocks,
        num_host_blocks=cache.host_blocks.shape[0],
        bytes_per_block=block_bytes,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        eos_token_ids=model.eos_token_ids,
        limited_by=pool.limited_by,
        copy_bytes_per_second=copy_rate,
    )
