"""Make the GPU runner from a configuration: read the weights, run the largest step once, size the pool, record graphs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import structlog
import torch

from millpond_common.contract.engine_config import EngineConfig
from millpond_engine.engine.runner import Runner
from millpond_engine.kernels.gpu.attention import GpuAttention
from millpond_engine.kernels.gpu.configs import Architecture, detect_architecture, supports
from millpond_engine.kernels.gpu.ops import GpuOps
from millpond_engine.kernels.inputs import AttentionShape
from millpond_engine.model.decoder import Decoder
from millpond_engine.model.errors import UnsupportedModelError
from millpond_engine.model.load import OpenedModel, choose_dtype, load_weights
from millpond_engine.model.source import ProgressCallback
from millpond_engine.model.split import Share
from millpond_engine.runner.cuda_cache import CudaKvCache
from millpond_engine.runner.cuda_memory import compute_device_pool, measure_activations
from millpond_engine.runner.cuda_rows import DeviceRows
from millpond_engine.runner.cuda_runner import CudaRunner
from millpond_engine.runner.cuda_runtime import CudaRuntime, DeviceRuntime
from millpond_engine.runner.group import RankGroup
from millpond_engine.runner.load import bytes_per_block, make_attention_shape, make_info, make_rope
from millpond_engine.runner.memory import AvailableMemory, PoolSize, check_weights_fit
from millpond_engine.runner.sampler import SLICE_BYTES

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, before there is a cache."""

    model: Decoder
    shape: AttentionShape
    dtype: torch.dtype
    rope: torch.Tensor
    max_tokens: int
    arch: Architecture


@dataclass(frozen=True, slots=True)
class CudaRank:
    """A rank on a GPU."""

    config: EngineConfig
    loaded: LoadedModel
    device: torch.device

    def finish(self, group: RankGroup) -> Runner:
        """Run the largest step once, agree on the pool with the other ranks, record the graphs."""
        config, loaded, runtime = self.config, self.loaded, CudaRuntime(self.device)
        group.split(loaded.model)
        with torch.inference_mode():
            peak, free = measure_activations(self.device, lambda: run_largest_step(config, loaded, runtime))
        pool = group.agree_on_pool(lambda: _size_pool(config, loaded, free_bytes=free, activation_bytes=peak))
        return make_runner(config, loaded, runtime, pool, group=group)


def make_runner(
    config: EngineConfig,
    loaded: LoadedModel,
    runtime: DeviceRuntime,
    pool: PoolSize,
    *,
    group: RankGroup | None = None,
) -> CudaRunner:
    """Allocate cache and state table and record the graphs."""
    shape, group = loaded.shape, group or RankGroup()
    block_bytes = sum(group.exchange(bytes_per_block(shape, loaded.dtype)))
    cache = CudaKvCache(
        shape,
        runtime,
        num_blocks=pool.num_blocks,
        num_host_blocks=config.kv_cache.host_bytes // block_bytes,
        dtype=loaded.dtype,
    )
    info = make_info(
        loaded.model.config,
        config,
        shape=shape,
        dtype=loaded.dtype,
        device=runtime.device,
        pool=pool,
        cache=cache,
        max_tokens=loaded.max_tokens,
        group=group,
    )
    return CudaRunner(
        info=info,
        model=loaded.model,
        attention=_make_attention(config, loaded, cache.device_blocks),
        cache=cache,
        rows=_make_rows(config, loaded, runtime),
        runtime=runtime,
        max_sequences=config.scheduling.max_sequences,
    )


def run_largest_step(config: EngineConfig, loaded: LoadedModel, runtime: DeviceRuntime) -> None:
    """Compute a full batch of prompt tokens and the scores of as many rows as are scored at once.

    All tokens write to one block: nothing of it is read back.
    """
    cache = torch.zeros(loaded.shape.cache_shape(1), dtype=loaded.dtype, device=runtime.device)
    attention = _make_attention(config, loaded, cache)
    left = config.scheduling.max_batch_tokens
    counts: list[int] = []
    while left > 0 and len(counts) < config.scheduling.max_sequences:
        counts.append(min(left, loaded.max_tokens))
        left -= counts[-1]
    rows = np.arange(len(counts), dtype=np.int32)
    inputs, ids = _make_rows(config, loaded, runtime).inputs(
        rows, np.zeros_like(rows), np.array(counts, np.int32)
    )
    attention.bind(inputs)
    hidden = loaded.model.forward(ids, attention, None)
    scored = max(1, SLICE_BYTES // (4 * loaded.model.config.vocabulary_size))
    edited = loaded.model.scores(hidden[: min(scored, config.scheduling.max_sequences)]).clone()
    edited.log_softmax(-1).topk(1)


def load_cuda_rank(
    config: EngineConfig,
    opened: OpenedModel,
    device: torch.device,
    *,
    share: Share,
    progress: ProgressCallback | None = None,
) -> CudaRank:
    """Read a share of the opened model onto the GPU that `cuda_device.find_gpu` named.

    Raises:
        UnsupportedModelError: a shape that the kernels do not run.
    """
    model_config = share.narrow(opened.config)
    dtype = choose_dtype(config.dtype, model_config, device)
    shape = make_attention_shape(model_config, config.kv_cache.block_tokens)
    problem = supports(shape, dtype)
    if problem is not None:
        raise UnsupportedModelError(f"the GPU kernels cannot run this model: {problem}; device Cpu can")
    weight_bytes = share.count_weights(opened.config, packed_head=False) * dtype.itemsize
    check_weights_fit(weight_bytes, AvailableMemory(torch.cuda.mem_get_info(device)[0], "the device"))
    model = load_weights(opened, GpuOps(), dtype=dtype, device=device, share=share, progress=progress)
    max_tokens = min(config.max_model_tokens, model_config.max_position_tokens)
    rope = make_rope(model_config, model, max_tokens).to(device)
    arch = detect_architecture(device)
    _log.info("gpu", name=torch.cuda.get_device_name(device), architecture=str(arch), rank=share.rank)
    return CudaRank(config, LoadedModel(model, shape, dtype, rope, max_tokens, arch), device)


def _size_pool(
    config: EngineConfig, loaded: LoadedModel, *, free_bytes: int, activation_bytes: int
) -> PoolSize:
    block_tokens = config.kv_cache.block_tokens
    return compute_device_pool(
        free_bytes=free_bytes,
        activation_bytes=activation_bytes,
        percent=config.kv_cache.device_percent,
        bytes_per_block=bytes_per_block(loaded.shape, loaded.dtype),
        block_tokens=block_tokens,
        device_bytes=config.kv_cache.device_bytes,
        useful_blocks=config.scheduling.max_sequences * -(-loaded.max_tokens // block_tokens),
    )


def _make_attention(config: EngineConfig, loaded: LoadedModel, cache: torch.Tensor) -> GpuAttention:
    return GpuAttention(
        loaded.shape, cache, loaded.rope, max_decodes=config.scheduling.max_sequences, arch=loaded.arch
    )


def _make_rows(config: EngineConfig, loaded: LoadedModel, runtime: DeviceRuntime) -> DeviceRows:
    return DeviceRows(
        runtime,
        max_rows=config.scheduling.max_sequences,
        max_tokens=loaded.max_tokens,
        block_tokens=config.kv_cache.block_tokens,
    )
