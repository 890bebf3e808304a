"""Weights of a directory of safetensors files, one or sharded."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from millpond_engine.model.errors import ModelFormatError, UnsupportedModelError
from millpond_engine.model.source import Piece, check_shape

INDEX_NAME = "model.safetensors.index.json"
SLICE_BYTES = 64 << 20
_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
"""Types whose numbers are the weights; the others need scales to become some."""


class SafetensorsSource:
    """Sharded safetensors; one shard is open at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files = _tensor_files(directory)
        self._open_path: Path | None = None
        self._open: Any = None

    @property
    def total_bytes(self) -> int:
        return sum(path.stat().st_size for path in set(self._files.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read_into(self, piece: Piece, target: torch.Tensor) -> int:
        view = self._slice(piece.name)
        check_shape(str(self._files[piece.name]), piece, tuple(view.get_shape()))
        rows, columns = piece.rows, piece.columns
        step = max(1, SLICE_BYTES // (4 * max(1, target[:1].numel())))
        item_bytes = 0
        for first in range(rows.first, rows.last, step):
            last = min(first + step, rows.last)
            part = view[first:last] if columns is None else view[first:last, columns.first : columns.last]
            target[first - rows.first : last - rows.first].copy_(part)
            item_bytes = part.element_size()
        return item_bytes * math.prod(piece.shape)

    def list_unread(self, read: set[str]) -> list[str]:
        return [name for name in self._files if name not in read]

    def close(self) -> None:
        self._open = self._open_path = None

    def _slice(self, name: str) -> Any:
        path = self._files.get(name)
        if path is None:
            raise ModelFormatError(f"{self._directory} has no tensor {name}")
        if path != self._open_path:
            self._open, self._open_path = _open_file(path), path
        try:
            view = self._open.get_slice(name)
        except SafetensorError as error:
            raise ModelFormatError(
                f"{path} has no tensor {name}, which {INDEX_NAME} says it has; fetch the folder again"
            ) from error
        if view.get_dtype() not in _FLOATS:
            raise UnsupportedModelError(
                f"{path}: {name} has type {view.get_dtype()}; only {', '.join(sorted(_FLOATS))} are served"
            )
        return view


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise ModelFormatError(
            f"{path} is not a readable safetensors file ({error}); fetch it again"
        ) from error


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Map each tensor to its file, by the index where there is one."""
    index = directory / INDEX_NAME
    if index.exists():
        mapping = _read_index(index)
        missing = sorted({name for name in mapping.values() if not (directory / name).exists()})
        if missing:
            raise ModelFormatError(
                f"{directory} lacks {', '.join(missing[:3])} named by {INDEX_NAME}; fetch it again"
            )
        return {tensor: directory / name for tensor, name in mapping.items()}
    files: dict[str, Path] = {}
    whole = (
        directory / "model.safetensors"
    )  # beside it may lie an adapter, or the same weights under other names
    for path in [whole] if whole.exists() else sorted(directory.glob("*.safetensors")):
        files.update(dict.fromkeys(_open_file(path).keys(), path))
    if not files:
        raise ModelFormatError(f"{directory} holds no .safetensors file and no GGUF file")
    return files


def _read_index(path: Path) -> dict[str, str]:
    """Which file of the folder holds which tensor."""
    try:
        mapping = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        named = {str(tensor): str(name) for tensor, name in mapping.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFormatError(
            f"{path} is not a readable index of weights ({error}); fetch it again"
        ) from error
    return named
