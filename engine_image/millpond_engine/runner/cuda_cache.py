"""Paged KV on a GPU: transfers to and from pinned host memory beside the computation, copies in its stream."""

from __future__ import annotations

import numpy as np
import torch

from millpond_engine.kernels.inputs import AttentionShape
from millpond_engine.records.step import BlockCopy, BlockMove, StepPlan
from millpond_engine.runner.cuda_runtime import DeviceRuntime
from millpond_engine.runner.kv_cache import KvCache, merge_runs


class CudaKvCache(KvCache):
    """The cache of one GPU; no method waits for the device."""

    def __init__(
        self,
        shape: AttentionShape,
        runtime: DeviceRuntime,
        *,
        num_blocks: int,
        num_host_blocks: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(
            shape, num_blocks=num_blocks, num_host_blocks=num_host_blocks, dtype=dtype, device=runtime.device
        )
        self._runtime = runtime

    def move(self, plan: StepPlan) -> None:
        """Swap out, then in: blocks swapped in may be those that were just swapped out."""
        if plan.swap_out or plan.swap_in:
            with self._runtime.beside():
                self.swap_out(plan.swap_out)
                self.swap_in(plan.swap_in)

    def copy(self, copies: tuple[BlockCopy, ...]) -> None:
        if copies:
            pairs = np.array([(copy.source, copy.target) for copy in copies], np.int64)
            sources, targets = self._runtime.upload(np.ascontiguousarray(pairs.T)).unbind(0)
            self.device_blocks.index_copy_(0, targets, self.device_blocks.index_select(0, sources))

    def swap_out(self, moves: tuple[BlockMove, ...]) -> None:
        for device, host, count in merge_runs(moves):
            source = self.device_blocks[device : device + count]
            self.host_blocks[host : host + count].copy_(source, non_blocking=True)

    def swap_in(self, moves: tuple[BlockMove, ...]) -> None:
        for device, host, count in merge_runs(moves):
            source = self.host_blocks[host : host + count]
            self.device_blocks[device : device + count].copy_(source, non_blocking=True)
