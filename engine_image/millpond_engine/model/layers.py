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

    def vector(self, name: str) -> torch.Tensor:
        """One tensor as published."""
        return self.stacked([name])

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
class Linear:
    """A matrix in packed form, with an optional bias `[outputs]`."""

    weight: Any
    bias: torch.Tensor | None = None

    def __call__(self, ops: Ops, x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x, self.weight, self.bias)


@dataclass(slots=True)
class DecoderLayer:
    """Norm, attention, norm, gated feed-forward; the residual stream is updated in place."""

    index: int
    input_norm: torch.Tensor
    qkv: Linear
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    output: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    eps: float

    def forward(
        self, ops: Ops, x: torch.Tensor | None, residual: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Add `x` (the previous layer's output, absent in the first) to the stream; return this layer's output."""
        if x is None:
            normed = ops.rms_norm(residual, self.input_norm, self.eps)
        else:
            normed = ops.add_rms_norm(x, residual, self.input_norm, self.eps)
        attended = attend(self.index, self.qkv(ops, normed), self.head_norms)
        normed = ops.add_rms_norm(self.output(ops, attended), residual, self.post_norm, self.eps)
        return self.down(ops, ops.silu_mul(self.gate_up(ops, normed)))


def load_decoder_layer(
    index: int, *, config: ModelConfig, reader: WeightReader, ops: Ops, features: AttentionFeatures
) -> DecoderLayer:
    """Read one layer, fusing q with k and v, and gate with up."""
    prefix = f"model.layers.{index}."
    attention = prefix + "self_attn."
    qkv_names = [f"{attention}{part}_proj" for part in "qkv"]
    head_norms = None
    if features.head_norms:
        head_norms = (reader.vector(attention + "q_norm.weight"), reader.vector(attention + "k_norm.weight"))
    return DecoderLayer(
        index=index,
        input_norm=reader.vector(prefix + "input_layernorm.weight"),
        qkv=_linear(reader, ops, qkv_names, bias=features.qkv_bias),
        head_norms=head_norms,
        output=_linear(reader, ops, [attention + "o_proj"]),
        post_norm=reader.vector(prefix + "post_attention_layernorm.weight"),
        gate_up=_linear(reader, ops, [prefix + "mlp.gate_proj", prefix + "mlp.up_proj"]),
        down=_linear(reader, ops, [prefix + "mlp.down_proj"]),
        eps=config.norm_eps,
    )


def _linear(reader: WeightReader, ops: Ops, names: list[str], *, bias: bool = False) -> Linear:
    weight = ops.pack(reader.stacked([f"{name}.weight" for name in names]))
    return Linear(weight, reader.stacked([f"{name}.bias" for name in names]) if bias else None)
