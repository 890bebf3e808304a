"""Qwen2 and Qwen2.5: biases on q, k and v."""

from __future__ import annotations

from millpond_engine.model.config import ModelConfig
from millpond_engine.model.decoder import Decoder, load_decoder
from millpond_engine.model.layers import AttentionFeatures, WeightReader
from millpond_engine.model.ops import Ops
from millpond_engine.model.split import Share


def load(config: ModelConfig, share: Share, reader: WeightReader, ops: Ops) -> Decoder:
    """Read one rank's share of the weights."""
    return load_decoder(config, share, reader, ops, AttentionFeatures(qkv_bias=True))
