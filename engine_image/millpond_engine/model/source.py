"""Where weights come from: one protocol over GGUF and safetensors, tensor by tensor into memory given by the caller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far loading is."""

    loaded_bytes: int
    """Of the files, not of memory."""
    total_bytes: int


ProgressCallback = Callable[[LoadProgress], None]


class WeightSource(Protocol):
    """Tensors by their published names (`model.layers.0.self_attn.q_proj.weight`)."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors in the files."""
        ...

    def __contains__(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as a row-major matrix `[outputs, inputs]`."""
        ...

    def read_into(self, name: str, target: torch.Tensor) -> int:
        """Fill `target`, converting to its dtype in bounded memory; returns the bytes read from the file.

        Raises:
            ModelFormatError: no such tensor, or another shape than the target's.
        """
        ...

    def close(self) -> None:
        """Release the files. Idempotent."""
        ...
