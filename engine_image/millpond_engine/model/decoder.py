"""A decoder-only transformer: embedding, layers, final norm, output matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from millpond_engine.model.config import ModelConfig
from millpond_engine.model.layers import (
    AttentionFeatures,
    DecoderLayer,
    WeightReader,
    load_decoder_layer,
)
from millpond_engine.model.ops import Attend, Ops


@dataclass(slots=True)
class Decoder:
    """Weights of one model, bound to the operations of one device."""

    config: ModelConfig
    ops: Ops
    embedding: torch.Tensor
    layers: list[DecoderLayer]
    final_norm: torch.Tensor
    head: Any
    rope_divisors: torch.Tensor | None = None
    """Factors on the rotary frequencies that came with the weights."""

    def forward(self, tokens: torch.Tensor, attend: Attend, wanted: torch.Tensor | None) -> torch.Tensor:
        """Run the flattened batch.

        Args:
            tokens: `[num_tokens]` ids.
            attend: attention bound to this step.
            wanted: indices of the tokens whose final hidden state is needed; all when absent.

        Returns:
            Normed hidden states `[num_wanted, hidden]`.
        """
        residual = self.ops.embed(tokens, self.embedding)
        for layer in self.layers:
            layer.forward(self.ops, residual, attend)
        if wanted is not None:
            residual = self.ops.select(residual, wanted)
        return self.ops.rms_norm(residual, self.final_norm, self.config.norm_eps)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores over the vocabulary in float32, `[num_wanted, vocabulary_size]`."""
        return self.ops.scores(hidden, self.head)


def load_decoder(config: ModelConfig, reader: WeightReader, ops: Ops, features: AttentionFeatures) -> Decoder:
    """Read a whole model, layer by layer."""
    embedding = reader.stacked({"model.embed_tokens.weight": config.vocabulary_size}, config.hidden_size)
    tied = config.tied_embeddings or "lm_head.weight" not in reader.source
    head = (
        embedding if tied else reader.stacked({"lm_head.weight": config.vocabulary_size}, config.hidden_size)
    )
    layers = [
        load_decoder_layer(index, config=config, reader=reader, ops=ops, features=features)
        for index in range(config.num_layers)
    ]
    norm = ops.vector(reader.stacked({"model.norm.weight": config.hidden_size}))
    divisors = (
        reader.stacked({"rope_divisors": config.head_dim // 2}).float().cpu()
        if "rope_divisors" in reader.source
        else None
    )
    return Decoder(config, ops, embedding, layers, norm, ops.pack(head), divisors)
