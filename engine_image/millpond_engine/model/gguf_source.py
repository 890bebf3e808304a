"""Weights and metadata of a GGUF file, dequantized slice by slice."""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize

from millpond_engine.model.config import ModelConfig
from millpond_engine.model.errors import ModelFormatError, UnsupportedModelError

SLICE_BYTES = 64 << 20
"""Most float32 bytes that dequantization holds at once."""

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
            self._reader = GGUFReader(path)
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise ModelFormatError(f"{path} is not a readable GGUF file ({error}); fetch it again") from error
        self._path = path
        self._tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in self._reader.tensors}
        self._permuted_heads: dict[str, int] = {}

    def metadata(self) -> dict[str, Any]:
        """Plain values by key; arrays only by their length."""
        values: dict[str, Any] = {}
        for key, field in self._reader.fields.items():
            values[key] = len(field.data) if len(field.data) > 1 else field.contents()
        return values

    def undo_permutation(self, config: ModelConfig) -> None:
        """Tell the source that q and k rows are interleaved per head, as llama.cpp writes the Llama family."""
        if config.family == "llama":
            self._permuted_heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}

    @property
    def total_bytes(self) -> int:
        return sum(int(tensor.n_bytes) for tensor in self._tensors.values())

    def __contains__(self, name: str) -> bool:
        return _gguf_name(name) in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self._tensor(name).shape))

    def read_into(self, name: str, target: torch.Tensor) -> int:
        tensor = self._tensor(name)
        if self.shape(name) != tuple(target.shape):
            raise ModelFormatError(
                f"{self._path}: {name} has shape {self.shape(name)}, expected {tuple(target.shape)}"
            )
        self._dequantize_into(tensor, target)
        heads = self._permuted_heads.get(tensor.name.split(".")[-2], 0)
        if heads:
            _unpermute(target, heads)
        self._release_pages()
        return int(tensor.n_bytes)

    def close(self) -> None:
        self._tensors.clear()

    def _tensor(self, name: str) -> ReaderTensor:
        try:
            return self._tensors[_gguf_name(name)]
        except KeyError:
            raise ModelFormatError(f"{self._path} has no tensor {_gguf_name(name)}") from None

    def _dequantize_into(self, tensor: ReaderTensor, target: torch.Tensor) -> None:
        flat = target.reshape(-1, target.shape[-1]) if target.dim() > 1 else target.unsqueeze(0)
        rows = tensor.data.reshape(flat.shape[0], -1)
        step = max(1, SLICE_BYTES // (4 * flat.shape[1]))
        for first in range(0, flat.shape[0], step):
            try:
                values = dequantize(rows[first : first + step], tensor.tensor_type)
            except NotImplementedError as error:
                raise UnsupportedModelError(
                    f"{self._path}: tensor {tensor.name} has type {tensor.tensor_type.name}, which cannot be dequantized"
                ) from error
            flat[first : first + step].copy_(torch.from_numpy(np.require(values, requirements=["C", "W"])))

    def _release_pages(self) -> None:
        """Give the file's pages back, so that mapped weights do not count against the container's memory."""
        mapped = getattr(self._reader.data, "_mmap", None)
        if isinstance(mapped, mmap.mmap):
            with contextlib.suppress(OSError, ValueError):
                mapped.madvise(mmap.MADV_DONTNEED)


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
