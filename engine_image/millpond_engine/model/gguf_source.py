"""Weights and metadata of a GGUF file, dequantized slice by slice."""

from __future__ import annotations

import contextlib
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from millpond_engine.gguf_header import GgufHeaderError, TensorEntry, read_gguf_header
from millpond_engine.model.config import ModelConfig
from millpond_engine.model.errors import ModelFormatError, UnsupportedModelError
from millpond_engine.model.source import Piece, check_shape
from millpond_engine.model.split import Span

SLICE_BYTES = 4 << 20
"""Float32 bytes that one call dequantizes; small enough that its temporaries stay in the cache."""

_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "rope_divisors": "rope_freqs.weight",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class GgufSource:
    """A memory-mapped GGUF file as a weight source."""

    def __init__(self, path: Path) -> None:
        try:
            header = read_gguf_header(path)
            self._data: np.memmap[Any, np.dtype[np.uint8]] = np.memmap(path, np.uint8, mode="r")
        except (OSError, GgufHeaderError) as error:
            raise ModelFormatError(f"{error}; fetch the file again") from error
        self._path = path
        for entry in header.tensors.values():
            _check_entry(path, entry, self._data.size)
        self._metadata = header.metadata
        self._tensors = header.tensors
        self._permuted: frozenset[str] = frozenset()
        self._head_dim = 0

    @property
    def metadata(self) -> dict[str, Any]:
        """Plain values by key."""
        return self._metadata

    def undo_permutation(self, config: ModelConfig) -> None:
        """Tell the source that q and k rows are interleaved per head, as llama.cpp writes the Llama family."""
        if config.family == "llama":
            self._permuted, self._head_dim = frozenset({"attn_q", "attn_k"}), config.head_dim

    @property
    def total_bytes(self) -> int:
        return sum(_stored_bytes(entry) for entry in self._tensors.values())

    def __contains__(self, name: str) -> bool:
        return _gguf_name(name) in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def read_into(self, piece: Piece, target: torch.Tensor) -> int:
        tensor = self._tensor(piece.name)
        check_shape(str(self._path), piece, tensor.shape)
        self._dequantize_into(tensor, piece, target)
        if tensor.name.split(".")[-2] in self._permuted:
            _unpermute(target, target.shape[0] // self._head_dim)
        self._release_pages()
        return _stored_bytes(tensor)

    def list_unread(self, read: set[str]) -> list[str]:
        known = {_gguf_name(name) for name in read}
        return [name for name in self._tensors if name not in known]

    def close(self) -> None:
        self._tensors.clear()

    def _tensor(self, name: str) -> TensorEntry:
        try:
            return self._tensors[_gguf_name(name)]
        except KeyError:
            raise ModelFormatError(f"{self._path} has no tensor {_gguf_name(name)}") from None

    def _dequantize_into(self, tensor: TensorEntry, piece: Piece, target: torch.Tensor) -> None:
        """Decode the blocks that cover the piece, slice by slice."""
        kind = GGMLQuantizationType(tensor.type_id)
        stored = self._data[tensor.offset : tensor.offset + _stored_bytes(tensor)]
        where, width = f"{self._path}: tensor {tensor.name}", tensor.shape[-1]
        rows = np.asarray(stored).reshape(math.prod(tensor.shape[:-1]), -1)
        if len(tensor.shape) == 1:  # its elements are what a matrix calls columns
            covered = _cover(piece.rows, kind)
            target.copy_(_decode(rows[:, covered.stored], kind, where)[0, covered.wanted])
            return
        covered = _cover(piece.columns or Span(0, width), kind)
        step = max(1, SLICE_BYTES // (4 * width))
        for first in range(piece.rows.first, piece.rows.last, step):
            last = min(first + step, piece.rows.last)
            decoded = _decode(rows[first:last, covered.stored], kind, where)
            target[first - piece.rows.first : last - piece.rows.first].copy_(decoded[:, covered.wanted])

    def _release_pages(self) -> None:
        """Give the file's pages back, so that mapped weights do not count against the container's memory."""
        mapped = getattr(self._data, "_mmap", None)
        if isinstance(mapped, mmap.mmap):
            with contextlib.suppress(OSError, ValueError):
                mapped.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True, slots=True)
class _Cover:
    """Whole blocks around a span of elements."""

    stored: slice
    """Bytes of the blocks inside a row."""
    wanted: slice
    """The span inside the decoded blocks."""


def _cover(span: Span, kind: GGMLQuantizationType) -> _Cover:
    block, size = GGML_QUANT_SIZES[kind]
    first, last = span.first // block, -(-span.last // block)
    return _Cover(
        slice(first * size, last * size), slice(span.first - first * block, span.last - first * block)
    )


def _decode(
    rows: np.ndarray[Any, np.dtype[np.uint8]], kind: GGMLQuantizationType, where: str
) -> torch.Tensor:
    """Dequantize rows of whole blocks. They are passed as one long row: blocks never span rows, and the library loops over rows."""
    raw = np.ascontiguousarray(rows).reshape(1, -1)
    try:
        if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            raw = raw.view(np.float32 if kind == GGMLQuantizationType.F32 else np.float16)
        decoded = torch.from_numpy(np.require(dequantize(raw, kind), requirements=["C", "W"]))
    except NotImplementedError as error:
        raise UnsupportedModelError(f"{where} has type {kind.name}, which cannot be dequantized") from error
    return decoded.view(rows.shape[0], -1)


def _check_entry(path: Path, entry: TensorEntry, num_bytes: int) -> None:
    """Refuse at once what would be found out only when loading comes to this tensor.

    Raises:
        UnsupportedModelError: a type that nobody knows.
        ModelFormatError: rows of broken blocks, or the file ends too early.
    """
    try:
        block, _ = GGML_QUANT_SIZES[GGMLQuantizationType(entry.type_id)]
    except (ValueError, KeyError):
        raise UnsupportedModelError(
            f"{path}: tensor {entry.name} has the unknown type {entry.type_id}"
        ) from None
    if not entry.shape or min(entry.shape) < 1 or entry.shape[-1] % block:
        raise ModelFormatError(
            f"{path}: tensor {entry.name} of shape {entry.shape} is damaged; fetch it again"
        )
    if entry.offset + _stored_bytes(entry) > num_bytes:
        raise ModelFormatError(f"{path} ends inside tensor {entry.name}; fetch the file again")


def _stored_bytes(entry: TensorEntry) -> int:
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(entry.type_id)]
    return math.prod(entry.shape) // block * size


def _gguf_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    prefix, _, rest = name.removeprefix("model.layers.").partition(".")
    stem, _, kind = rest.rpartition(".")
    return f"blk.{prefix}.{_LAYER.get(stem, stem)}.{kind}"


def _unpermute(weight: torch.Tensor, heads: int) -> None:
    """Turn rows (pair, half) back into (half, pair) in every head, in place."""
    rows = weight.view(heads, weight.shape[0] // heads // 2, 2, -1)
    weight.copy_(rows.transpose(1, 2).reshape(weight.shape).clone())
