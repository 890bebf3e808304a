"""Layers that the families share. Weights are plain tensors; the operations come from outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from millpond_engine.model.config import ModelConfig
from millpond_engine.model.ops import Attend, Ops
from millpond_engine.model.source import WeightSource


@dataclass(frozen=True, slots=True)
class AttentionFeatures:
    """What tells the families' attention apart."""

    qkv_bias: bool = False
    head_norms: bool = False


class WeightReader:
    """Reads named tensors into new ones of the wanted dtype and reports the bytes."""

    def __init__(
        self, source: WeightSource, dtype: torch.dtype, device: torch.device, on_bytes: Callable[[int], None]
    ) -> None:
        self.source = source
        self.dtype = dtype
        self.device = device
        self._on_bytes = on_bytes

    def stacked(self, names: list[str]) -> torch.Tensor:
        """Tensors with equal trailing sizes, one below the other in one new tensor."""
        shapes = [self.source.shape(name) for name in names]
        rows = sum(shape[0] for shape in shapes)
        target = torch.empty((rows, *shapes[0][1:]), dtype=self.dtype, device=self.device)
        first = 0
        for name, shape in zip(names, shapes, strict=True):
            self._on_bytes(self.source.read_into(name, target[first : first + shape[0]]))
            first += shape[0]
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
    index: int, *, config: ModelConfig, reader: WeightReader, ops: Ops, features: AttentionFeatures
) -> DecoderLayer:
    """Read one layer, fusing q with k and v, and gate with up."""
    prefix = f"model.layers.{index}."
    attention = prefix + "self_attn."
    qkv = [f"{attention}{part}_proj" for part in "qkv"]

    def vector(name: str) -> torch.Tensor:
        return ops.vector(reader.stacked([name]))

    return DecoderLayer(
        index=index,
        input_norm=vector(prefix + "input_layernorm.weight"),
        qkv=ops.pack(reader.stacked([f"{name}.weight" for name in qkv])),
        qkv_bias=ops.vector(reader.stacked([f"{name}.bias" for name in qkv])) if features.qkv_bias else None,
        head_norms=(vector(attention + "q_norm.weight"), vector(attention + "k_norm.weight"))
        if features.head_norms
        else None,
        output=ops.pack(reader.stacked([attention + "o_proj.weight"])),
        post_norm=vector(prefix + "post_attention_layernorm.weight"),
        gate_up=ops.pack_gated(
            reader.stacked([prefix + "mlp.gate_proj.weight", prefix + "mlp.up_proj.weight"])
        ),
        down=ops.pack(reader.stacked([prefix + "mlp.down_proj.weight"])),
        eps=config.norm_eps,
    )
