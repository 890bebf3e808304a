"""Where weights come from: one protocol over GGUF and safetensors, piece by piece into memory given by the caller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from millpond_engine.model.errors import ModelFormatError
from millpond_engine.model.split import Span


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far loading is."""

    loaded_bytes: int
    """Of the files, not of memory; a tensor of which a rank reads a part counts whole."""
    total_bytes: int


ProgressCallback = Callable[[LoadProgress], None]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a stored tensor and, of a matrix, some of its columns; the rest is not read."""

    name: str
    shape: tuple[int, ...]
    """What the whole tensor must have."""
    rows: Span
    columns: Span | None = None
    """All when absent."""

    @property
    def size(self) -> tuple[int, ...]:
        """Shape of the piece."""
        inner = self.shape[1:] if self.columns is None else (self.columns.count,)
        return (self.rows.count, *inner)


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

    def read_into(self, piece: Piece, target: torch.Tensor) -> int:
        """Fill `target`, converting to its dtype in bounded memory; returns the bytes that the whole tensor has in the file.

        Raises:
            ModelFormatError: no such tensor, or another shape than the piece's whole.
        """
        ...

    def list_unread(self, read: set[str]) -> list[str]:
        """Tensors of the files, as the files name them, that are none of those `read`."""
        ...

    def close(self) -> None:
        """Release the files. Idempotent."""
        ...


def check_shape(where: str, piece: Piece, found: tuple[int, ...]) -> None:
    """Compare a stored tensor's shape with what the model's configuration promises.

    Raises:
        ModelFormatError: when they differ.
    """
    if found != piece.shape:
        raise ModelFormatError(f"{where}: {piece.name} has shape {found}, expected {piece.shape}")
