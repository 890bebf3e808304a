"""Sums and gatherings over the ranks of one node: gloo on a CPU, NCCL on GPUs, through torch.distributed."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVE_SECONDS = 120.0
"""Longest wait for a rank inside a step; one that ended breaks its connections and is noticed at once."""


class TorchCollectives:
    """The process group of one engine; a process is in one at a time."""

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        size: int,
        device: torch.device,
        seconds: float = COLLECTIVE_SECONDS,
    ) -> None:
        """Meet the other ranks through a file in `folder`, which no other user can read.

        Raises:
            RuntimeError: one of them did not come in time.
        """
        self._size = size
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one node: the ranks listen on loopback alone
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.FileStore(str(folder / "meeting"), size),  # type: ignore[attr-defined]  # documented there
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=seconds),
            device_id=device if device.type == "cuda" else None,
        )

    def sum(self, x: torch.Tensor) -> None:
        dist.all_reduce(x)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty((self._size, *x.shape), dtype=x.dtype, device=x.device)
        dist.all_gather_single(out.view(self._size * x.shape[0], *x.shape[1:]), x.contiguous())
        return out

    def exchange(self, value: Any) -> list[Any]:
        """Small plain values of all ranks, by rank."""
        found: list[Any] = [None] * self._size
        dist.all_gather_object(found, value)
        return found

    def close(self) -> None:
        """Leave the group. Idempotent."""
        if dist.is_initialized():
            dist.destroy_process_group()
