"""Layers that the families share. Weights are plain tensors; the operations come from outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from millpond_engine.model.config import ModelConfig
from millpond_engine.model.ops import Attend, Ops
from millpond_engine.model.source import Piece, WeightSource
from millpond_engine.model.split import Share, Span


@dataclass(frozen=True, slots=True)
class AttentionFeatures:
    """What tells the families' attention apart."""

    qkv_bias: bool = False
    head_norms: bool = False


class WeightReader:
    """Reads pieces of named tensors into new ones of the wanted dtype and reports the bytes."""

    def __init__(
        self, source: WeightSource, dtype: torch.dtype, device: torch.device, on_bytes: Callable[[int], None]
    ) -> None:
        self.source = source
        self.dtype = dtype
        self.device = device
        self._on_bytes = on_bytes
        self.read: set[str] = set()
        """Names of the tensors asked for."""

    def matrix(self, name: str, shape: tuple[int, int], *, columns: Span | None = None) -> torch.Tensor:
        """One matrix `[outputs, inputs]` in a new tensor, or some of its columns."""
        return self.stacked(Piece(name, shape, Span(0, shape[0]), columns))

    def vector(self, name: str, size: int) -> torch.Tensor:
        """One vector in a new tensor."""
        return self.stacked(Piece(name, (size,), Span(0, size)))

    def stacked(self, *pieces: Piece) -> torch.Tensor:
        """Pieces of equal width one below the other in one new tensor.

        Raises:
            ModelFormatError: one is missing or has another shape.
        """
        num_rows = sum(piece.rows.count for piece in pieces)
        target = torch.empty((num_rows, *pieces[0].size[1:]), dtype=self.dtype, device=self.device)
        first = 0
        for piece in pieces:
            last = first + piece.rows.count
            self.read.add(piece.name)
            self._on_bytes(self.source.read_into(piece, target[first:last]))
            first = last
        return target


@dataclass(slots=True)
class DecoderLayer:
    """Norm, attention, norm, gated feed-forward; the residual stream is updated in place."""

    index: int
    input_norm: torch.Tensor
    qkv: Any
    qkv_bias: torch.Tensor | None
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    output: Any
    post_norm: torch.Tensor
    gate_up: Any
    down: Any
    eps: float

    def forward(self, ops: Ops, residual: torch.Tensor, attend: Attend) -> None:
        """Add this layer's two contributions to the residual stream `[num_tokens, hidden]`."""
        normed = ops.rms_norm(residual, self.input_norm, self.eps)
        attended = attend(self.index, ops.linear(normed, self.qkv, self.qkv_bias), self.head_norms)
        ops.linear_add(attended, self.output, residual)
        normed = ops.rms_norm(residual, self.post_norm, self.eps)
        ops.linear_add(ops.gated(normed, self.gate_up), self.down, residual)


def load_decoder_layer(
    index: int,
    *,
    config: ModelConfig,
    share: Share,
    reader: WeightReader,
    ops: Ops,
    features: AttentionFeatures,
) -> DecoderLayer:
    """Read one rank's share of one layer, fusing q with k and v, and gate with up."""
    prefix = f"model.layers.{index}."
    attention, feed = prefix + "self_attn.", prefix + "mlp."
    hidden, dim = config.hidden_size, config.head_dim
    spans = {"q_proj": share.heads, "k_proj": share.kv_heads, "v_proj": share.kv_heads}
    totals = {"q_proj": config.query_size, "k_proj": config.kv_size, "v_proj": config.kv_size}

    def vector(name: str, size: int) -> torch.Tensor:
        return ops.vector(reader.vector(name, size))

    def pieces(kind: str, *inner: int) -> list[Piece]:
        return [
            Piece(f"{attention}{name}.{kind}", (totals[name], *inner), span.times(dim))
            for name, span in spans.items()
        ]

    def feed_piece(name: str) -> Piece:
        return Piece(f"{feed}{name}.weight", (config.intermediate_size, hidden), share.inner)

    output = reader.matrix(
        attention + "o_proj.weight", (hidden, config.query_size), columns=share.heads.times(dim)
    )
    down = reader.matrix(feed + "down_proj.weight", (hidden, config.intermediate_size), columns=share.inner)
    return DecoderLayer(
        index=index,
        input_norm=vector(prefix + "input_layernorm.weight", hidden),
        qkv=ops.pack(reader.stacked(*pieces("weight", hidden))),
        qkv_bias=ops.vector(reader.stacked(*pieces("bias"))) if features.qkv_bias else None,
        head_norms=(vector(attention + "q_norm.weight", dim), vector(attention + "k_norm.weight", dim))
        if features.head_norms
        else None,
        output=ops.pack(output),
        post_norm=vector(prefix + "post_attention_layernorm.weight", hidden),
        gate_up=ops.pack_gated(reader.stacked(feed_piece("gate_proj"), feed_piece("up_proj"))),
        down=ops.pack(down),
        eps=config.norm_eps,
    )
