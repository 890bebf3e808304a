"""Qwen2 and Qwen2.5: biases on q, k and v."""

from __future__ import annotations

from millpond_engine.model.config import ModelConfig
from millpond_engine.model.decoder import Decoder, load_decoder
from millpond_engine.model.layers import AttentionFeatures, WeightReader
from millpond_engine.model.ops import Ops


def load(config: ModelConfig, reader: WeightReader, ops: Ops) -> Decoder:
    """Read the weights."""
    return load_decoder(config, reader, ops, AttentionFeatures(qkv_bias=True))
