"""Layers that the families share. Weights are plain tensors; the operations come from outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

    def stacked(self, parts: Mapping[str, int], *inner: int) -> torch.Tensor:
        """Tensors `[rows, *inner]`, named with their rows, one below the other in one new tensor.

        Raises:
            ModelFormatError: one is missing or has another shape.
        """
        target = torch.empty((sum(parts.values()), *inner), dtype=self.dtype, device=self.device)
        first = 0
        for name, rows in parts.items():
            self._on_bytes(self.source.read_into(name, target[first : first + rows]))
            first += rows
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
    attention, feed = prefix + "self_attn.", prefix + "mlp."
    hidden, inner = config.hidden_size, config.intermediate_size
    qkv = {"q_proj": config.query_size, "k_proj": config.kv_size, "v_proj": config.kv_size}

    def vector(name: str, size: int) -> torch.Tensor:
        return ops.vector(reader.stacked({name: size}))

    biases = {f"{attention}{name}.bias": rows for name, rows in qkv.items()}
    norms = tuple(f"{attention}{part}_norm.weight" for part in "qk")
    return DecoderLayer(
        index=index,
        input_norm=vector(prefix + "input_layernorm.weight", hidden),
        qkv=ops.pack(
            reader.stacked({f"{attention}{name}.weight": rows for name, rows in qkv.items()}, hidden)
        ),
        qkv_bias=ops.vector(reader.stacked(biases)) if features.qkv_bias else None,
        head_norms=(vector(norms[0], config.head_dim), vector(norms[1], config.head_dim))
        if features.head_norms
        else None,
        output=ops.pack(reader.stacked({attention + "o_proj.weight": hidden}, config.query_size)),
        post_norm=vector(prefix + "post_attention_layernorm.weight", hidden),
        gate_up=ops.pack_gated(
            reader.stacked({feed + "gate_proj.weight": inner, feed + "up_proj.weight": inner}, hidden)
        ),
        down=ops.pack(reader.stacked({feed + "down_proj.weight": hidden}, inner)),
        eps=config.norm_eps,
    )
