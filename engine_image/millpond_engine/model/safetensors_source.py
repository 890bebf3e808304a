"""Weights of a directory of safetensors files, one or sharded."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from millpond_engine.model.errors import ModelFormatError
from millpond_engine.model.source import Piece, check_shape

INDEX_NAME = "model.safetensors.index.json"
SLICE_BYTES = 64 << 20


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

    def close(self) -> None:
        self._open = self._open_path = None

    def _slice(self, name: str) -> Any:
        path = self._files.get(name)
        if path is None:
            raise ModelFormatError(f"{self._directory} has no tensor {name}")
        if path != self._open_path:
            self._open, self._open_path = _open_file(path), path
        return self._open.get_slice(name)


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
        mapping = json.loads(index.read_text(encoding="utf-8")).get("weight_map", {})
        missing = sorted({name for name in mapping.values() if not (directory / name).exists()})
        if missing:
            raise ModelFormatError(
                f"{directory} lacks {', '.join(missing[:3])} named by {INDEX_NAME}; fetch it again"
            )
        return {tensor: directory / name for tensor, name in mapping.items()}
    files: dict[str, Path] = {}
    for path in sorted(directory.glob("*.safetensors")):
        files.update(dict.fromkeys(_open_file(path).keys(), path))
    if not files:
        raise ModelFormatError(f"{directory} holds no .safetensors file and no GGUF file")
    return files
