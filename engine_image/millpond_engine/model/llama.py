"""Llama 2, 3 and their kin (SmolLM2, TinyLlama)."""

from __future__ import annotations

from millpond_engine.model.config import ModelConfig
from millpond_engine.model.decoder import Decoder, load_decoder
from millpond_engine.model.layers import AttentionFeatures, WeightReader
from millpond_engine.model.ops import Ops


def load(config: ModelConfig, reader: WeightReader, ops: Ops) -> Decoder:
    """Read the weights."""
    return load_decoder(config, reader, ops, AttentionFeatures())
