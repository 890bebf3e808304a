"""A model's operations and its paged attention on the compiled CPU kernels."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from millpond_engine.kernels.cpu.library import ADD, GATE, STORE, STORE_FLOAT, AttentionCall, CpuLibrary
from millpond_engine.kernels.cpu.pages import Arena, allocate
from millpond_engine.kernels.inputs import AttentionShape, StepInputs

PANEL = 32
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Weights in the kernels' panels; `outputs` counts columns of the product."""

    panels: torch.Tensor
    outputs: int
    inputs: int
    dtype: torch.dtype


class CpuOps:
    """Operations over a flattened batch.

    The residual stream is float32. Results lie in buffers that the next call of the same kind
    overwrites: within a layer each is consumed before that.
    """

    def __init__(self, library: CpuLibrary, dtype: torch.dtype) -> None:
        self._library = library
        self._bf16 = int(dtype == torch.bfloat16)
        self.input_dtype = library.input_dtype(dtype)
        self._weights = Arena()
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}

    def pack(self, weight: torch.Tensor) -> PackedMatrix:
        return self._pack(weight, weight.shape[0], gated=False)

    def pack_gated(self, weight: torch.Tensor) -> PackedMatrix:
        return self._pack(weight, weight.shape[0] // 2, gated=True)

    def vector(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.float()

    def embed(self, tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        out = self._buffer("residual", tokens.shape[0], table.shape[1], torch.float32)
        self._library.embed(self._bf16, tokens.data_ptr(), table.data_ptr(), out.data_ptr(), *out.shape)
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = self._buffer("norm", x.shape[0], x.shape[1], self.input_dtype)
        self._library.norm(
            self._bf16, x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1], eps
        )
        return out

    def linear(self, x: torch.Tensor, weight: PackedMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = self._buffer("linear", x.shape[0], weight.outputs, self.input_dtype)
        return self._multiply(x, weight, out, STORE, bias)

    def linear_add(self, x: torch.Tensor, weight: PackedMatrix, residual: torch.Tensor) -> None:
        self._multiply(x, weight, residual, ADD)

    def partial(self, x: torch.Tensor, weight: PackedMatrix) -> torch.Tensor:
        out = self._buffer("partial", x.shape[0], weight.outputs, torch.float32)
        return self._multiply(x, weight, out, STORE_FLOAT)

    def add(self, product: torch.Tensor, residual: torch.Tensor) -> None:
        residual.add_(product)

    def select(self, residual: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return residual.index_select(0, wanted)

    def gated(self, x: torch.Tensor, weight: PackedMatrix) -> torch.Tensor:
        return self._multiply(
            x, weight, self._buffer("gated", x.shape[0], weight.outputs, self.input_dtype), GATE
        )

    def scores(self, x: torch.Tensor, weight: PackedMatrix) -> torch.Tensor:
        out = self._buffer("scores", x.shape[0], weight.outputs, torch.float32)
        return self._multiply(x, weight, out, STORE_FLOAT)

    def argmax(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._library.argmax(scores)

    def _multiply(
        self,
        x: torch.Tensor,
        weight: PackedMatrix,
        out: torch.Tensor,
        finish: int,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._library.multiply(
            self._bf16,
            x.data_ptr(),
            x.shape[0],
            weight.inputs,
            weight.panels.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            weight.outputs,
            finish,
        )
        return out

    def _pack(self, weight: torch.Tensor, outputs: int, *, gated: bool) -> PackedMatrix:
        words = weight.shape[1] * weight.element_size() // 4
        width = PANEL // 2 if gated else PANEL
        panels = self._weights.take((-(-outputs // width), words, PANEL), torch.int32)
        self._library.pack(weight.data_ptr(), weight.shape[0], words, panels.data_ptr(), int(gated))
        return PackedMatrix(panels, outputs, weight.shape[1], weight.dtype)

    def _buffer(self, name: str, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory kept between steps, so that large results do not fault in new pages each time."""
        kept = self._buffers.get((name, width))
        if kept is None or kept.shape[0] < rows:
            memory = allocate(rows * width * dtype.itemsize)
            kept = self._buffers[(name, width)] = memory.view(dtype).view(rows, width)
        return kept[:rows]


class CpuAttention:
    """Paged attention on the compiled kernels."""

    def __init__(
        self, library: CpuLibrary, shape: AttentionShape, cache: torch.Tensor, rope_table: torch.Tensor
    ) -> None:
        self._library = library
        self._bf16 = int(cache.dtype == torch.bfloat16)
        self._kept = (cache, rope_table)  # the call holds their addresses only
        self._bound: StepInputs | None = None
        self._out = torch.empty(0)
        self._width = shape.num_heads * shape.head_dim
        self.input_dtype = library.input_dtype(cache.dtype)
        self._call = AttentionCall(
            cache=cache.data_ptr(),
            rope=rope_table.data_ptr(),
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_tokens=shape.block_tokens,
            norm_eps=shape.norm_eps,
        )
        self._address = ctypes.addressof(self._call)

    def bind(self, inputs: StepInputs) -> None:
        call, self._bound = self._call, inputs
        if self._out.shape[0] < inputs.num_tokens:
            self._out = torch.empty((inputs.num_tokens, self._width), dtype=self.input_dtype)
        call.out = self._out.data_ptr()
        call.rows, call.starts = inputs.rows.data_ptr(), inputs.starts.data_ptr()
        call.offsets, call.tables = inputs.query_offsets.data_ptr(), inputs.block_tables.data_ptr()
        call.num_rows, call.table_stride = inputs.rows.shape[0], inputs.block_tables.shape[1]

    def __call__(
        self, layer: int, qkv: torch.Tensor, head_norms: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        call = self._call
        call.qkv, call.layer = qkv.data_ptr(), layer
        if head_norms is not None:
            call.query_norm, call.key_norm = head_norms[0].data_ptr(), head_norms[1].data_ptr()
        self._library.attend(self._bf16, self._address)
        return self._out[: qkv.shape[0]]


def supports(shape: AttentionShape, sizes: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether the kernels run this model: whole vectors of head dimensions and block slots, even inner sizes."""
    return (
        dtype in DTYPES
        and shape.head_dim % 32 == 0
        and shape.head_dim <= 1024
        and shape.block_tokens % 16 == 0
        and all(size % 2 == 0 for size in sizes)
    )
