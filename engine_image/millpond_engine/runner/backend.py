"""Which kernels run a model: compiled ones where they fit, plain torch otherwise."""

from __future__ import annotations

from dataclasses import dataclass

import structlog
import torch

from millpond_engine.kernels.cpu.build import KernelBuildError
from millpond_engine.kernels.cpu.library import CpuLibrary, load_library
from millpond_engine.kernels.cpu.ops import CpuAttention, CpuOps, supports
from millpond_engine.kernels.inputs import AttentionShape, PagedAttention
from millpond_engine.kernels.reference import ReferenceAttention, ReferenceOps
from millpond_engine.model.config import ModelConfig
from millpond_engine.model.ops import Ops

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Backend:
    """Operations of one device for one model."""

    name: str
    ops: Ops
    shape: AttentionShape
    library: CpuLibrary | None = None

    def make_attention(self, cache: torch.Tensor, rope_table: torch.Tensor) -> PagedAttention:
        """Paged attention over a cache of `shape.cache_shape(num_blocks)`."""
        if self.library is not None:
            return CpuAttention(self.library, self.shape, cache, rope_table)
        return ReferenceAttention(self.shape, cache, rope_table)


def choose_backend(
    config: ModelConfig, shape: AttentionShape, dtype: torch.dtype, device: torch.device
) -> Backend:
    """Pick the kernels, and say so when it is not the fast ones."""
    sizes = (config.hidden_size, config.intermediate_size, config.query_size)
    if device.type != "cpu" or not supports(shape, sizes, dtype):
        _log.info(
            "plain_torch",
            device=str(device),
            dtype=str(dtype),
            head_dim=shape.head_dim,
            block_tokens=shape.block_tokens,
        )
        return Backend("torch", ReferenceOps(), shape)
    try:
        library = load_library()
    except KernelBuildError as error:
        _log.warning("kernels_not_compiled", error=str(error), effect="slow plain torch is used")
        return Backend("torch", ReferenceOps(), shape)
    return Backend(library.variant.name, CpuOps(library, dtype), shape, library)
