"""Paged KV in device memory, its twin in host memory, and the copies between them."""

from __future__ import annotations

import time

import torch

from millpond_engine.kernels.cpu.pages import advise_huge_pages
from millpond_engine.kernels.inputs import AttentionShape
from millpond_engine.records.step import BlockCopy, BlockMove


class KvCache:
    """One tensor of device blocks and one of host blocks; a block's bytes are contiguous over all layers."""

    def __init__(
        self,
        shape: AttentionShape,
        *,
        num_blocks: int,
        num_host_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # Not zeroed: no slot is read before it is written, and untouched memory costs nothing.
        self.device_blocks = torch.empty(shape.cache_shape(num_blocks), dtype=dtype, device=device)
        if device.type == "cpu":
            advise_huge_pages(self.device_blocks)  # before the first touch
        pinned = device.type == "cuda" and num_host_blocks > 0
        self.host_blocks = torch.zeros(shape.cache_shape(num_host_blocks), dtype=dtype, pin_memory=pinned)

    def copy(self, copies: tuple[BlockCopy, ...]) -> None:
        """Copy whole blocks on the device."""
        if copies:
            sources = self._indices([copy.source for copy in copies])
            self.device_blocks[self._indices([copy.target for copy in copies])] = self.device_blocks[sources]

    def swap_out(self, moves: tuple[BlockMove, ...]) -> None:
        """Copy device blocks to host blocks."""
        for device, host, count in merge_runs(moves):
            self.host_blocks[host : host + count].copy_(self.device_blocks[device : device + count])

    def swap_in(self, moves: tuple[BlockMove, ...]) -> None:
        """Copy host blocks to device blocks."""
        for device, host, count in merge_runs(moves):
            self.device_blocks[device : device + count].copy_(self.host_blocks[host : host + count])

    def poison(self, blocks: tuple[int, ...]) -> None:
        """Fill blocks with NaN, so that a read of freed memory shows in the output."""
        if blocks:
            self.device_blocks[self._indices(list(blocks))] = float("nan")

    def measure_copy_bandwidth(self) -> float:
        """Bytes per second from device to host, over at most 64 MiB."""
        block = self.device_blocks[:1]
        count = max(1, min(self.device_blocks.shape[0], (64 << 20) // max(1, block.nbytes)))
        source = self.device_blocks[:count]
        target = torch.empty_like(source, device="cpu", pin_memory=source.device.type == "cuda")
        target.copy_(source)  # touch the pages first
        _synchronize(source.device)
        started = time.perf_counter()
        target.copy_(source)
        _synchronize(source.device)
        return source.nbytes / max(time.perf_counter() - started, 1e-9)

    def _indices(self, blocks: list[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.long, device=self.device_blocks.device)


def merge_runs(moves: tuple[BlockMove, ...]) -> list[tuple[int, int, int]]:
    """Join moves of neighbouring blocks into (first device block, first host block, count)."""
    runs: list[tuple[int, int, int]] = []
    for move in moves:
        if runs:
            device, host, count = runs[-1]
            if (move.device, move.host) == (device + count, host + count):
                runs[-1] = (device, host, count + 1)
                continue
        runs.append((move.device, move.host, 1))
    return runs


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
