"""The compiled kernels as Python functions over tensors."""

from __future__ import annotations

import ctypes
import functools
import platform
from ctypes import c_float, c_int, c_int64, c_long, c_void_p
from typing import Any

import torch

from millpond_engine.kernels.cpu.build import Variant, choose_variant, find_library, read_cpu_words

STORE, ADD, GATE, STORE_FLOAT = range(4)


class AttentionCall(ctypes.Structure):
    """Arguments of paged attention; fields and order as in attention.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("qkv", "out", "cache", "rope", "query_norm", "key_norm")),
        *((name, c_void_p) for name in ("rows", "starts", "offsets", "tables")),
        *((name, c_int64) for name in ("num_rows", "table_stride", "layer", "num_layers")),
        *((name, c_int64) for name in ("num_heads", "num_kv_heads", "head_dim", "block_tokens")),
        ("norm_eps", c_float),
    )


_SIGNATURES: dict[str, list[Any]] = {
    "millpond_multiply": [c_int, c_void_p, c_long, c_long, c_void_p, c_void_p, c_void_p, c_long, c_int],
    "millpond_pack": [c_void_p, c_long, c_long, c_void_p, c_int],
    "millpond_norm": [c_int, c_void_p, c_void_p, c_void_p, c_long, c_long, c_float],
    "millpond_embed": [c_int, c_void_p, c_void_p, c_void_p, c_long, c_long],
    "millpond_attend": [c_int, c_void_p],
    "millpond_argmax": [c_void_p, c_long, c_long, c_void_p, c_void_p],
}


class CpuLibrary:
    """Loaded kernels of one variant.

    Raises:
        KernelBuildError: they cannot be compiled.
    """

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        library = ctypes.CDLL(str(find_library(variant)))  # after torch, whose OpenMP runtime it shares
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = None
        library.millpond_input_bytes.restype = c_int
        self.widens = library.millpond_input_bytes() == 4
        """Whether products of bfloat16 weights take float32 left-hand sides (else bfloat16)."""
        self.multiply = library.millpond_multiply
        self.pack = library.millpond_pack
        self.norm = library.millpond_norm
        self.embed = library.millpond_embed
        self.attend = library.millpond_attend
        self._argmax = library.millpond_argmax

    def input_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of a product's left-hand side, and of what norms, products and attention return."""
        return torch.float32 if self.widens else dtype

    def argmax(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Largest value and its first index in each row of a float32 matrix; NaN where a row holds one."""
        best = torch.empty(scores.shape[0])
        index = torch.empty(scores.shape[0], dtype=torch.int64)
        self._argmax(scores.data_ptr(), scores.shape[0], scores.shape[1], best.data_ptr(), index.data_ptr())
        return best, index


@functools.cache
def load_library(variant: Variant | None = None) -> CpuLibrary:
    """The kernels for this processor, or of a named variant.

    Raises:
        KernelBuildError: they cannot be compiled.
    """
    return CpuLibrary(variant or choose_variant(platform.machine(), read_cpu_words()))
