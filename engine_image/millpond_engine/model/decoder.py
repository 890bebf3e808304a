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
from millpond_engine.model.source import Piece
from millpond_engine.model.split import Share


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


def load_decoder(
    config: ModelConfig, share: Share, reader: WeightReader, ops: Ops, features: AttentionFeatures
) -> Decoder:
    """Read one rank's share of a model, layer by layer; the embedding is whole on every rank."""
    table = (config.vocabulary_size, config.hidden_size)
    embedding = reader.matrix("model.embed_tokens.weight", table)
    if config.tied_embeddings or "lm_head.weight" not in reader.source:
        head = embedding[share.vocabulary.first : share.vocabulary.last]
    else:
        head = reader.stacked(Piece("lm_head.weight", table, share.vocabulary))
    layers = [
        load_decoder_layer(index, config=config, share=share, reader=reader, ops=ops, features=features)
        for index in range(config.num_layers)
    ]
    norm = ops.vector(reader.vector("model.norm.weight", config.hidden_size))
    divisors = (
        reader.vector("rope_divisors", config.head_dim // 2).float().cpu()
        if "rope_divisors" in reader.source
        else None
    )
    return Decoder(config, ops, embedding, layers, norm, ops.pack(head), divisors)
