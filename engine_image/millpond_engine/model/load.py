"""Open a model's files and read its weights, whatever the format."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from millpond_engine.model import llama, qwen2, qwen3
from millpond_engine.model.config import ModelConfig, parse_gguf_metadata, parse_hf_config
from millpond_engine.model.decoder import Decoder
from millpond_engine.model.errors import ModelFormatError, UnsupportedModelError
from millpond_engine.model.gguf_source import GgufSource
from millpond_engine.model.layers import WeightReader
from millpond_engine.model.ops import Ops
from millpond_engine.model.safetensors_source import SafetensorsSource
from millpond_engine.model.source import LoadProgress, ProgressCallback, WeightSource
from millpond_engine.model.split import Share, compute_share

_DERIVED = ("rotary_emb.inv_freq", "attn_rot_embd.weight")
"""Ends of the names of tensors that some files carry and that follow from the configuration."""
_LOADERS = {"llama": llama.load, "qwen2": qwen2.load, "qwen3": qwen3.load}


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model whose shape is known and whose weights are not read yet."""

    config: ModelConfig
    source: WeightSource
    path: Path


def open_model(path: Path) -> OpenedModel:
    """Read the shape of the model in a GGUF file, or in a directory holding one or safetensors.

    Raises:
        ModelFormatError: nothing readable there.
        UnsupportedModelError: a model this engine cannot run.
    """
    gguf = _find_gguf(path)
    if gguf is not None:
        source = GgufSource(gguf)
        config = parse_gguf_metadata(source.metadata)
        source.undo_permutation(config)
        return OpenedModel(replace(config, tied_embeddings="lm_head.weight" not in source), source, gguf)
    config_file = path / "config.json"
    if not config_file.is_file():
        raise ModelFormatError(
            f"{path} is neither a GGUF file nor a directory with config.json; check model_path"
        )
    generation = path / "generation_config.json"
    config = parse_hf_config(
        _read_json(config_file), _read_json(generation) if generation.is_file() else None
    )
    return OpenedModel(config, SafetensorsSource(path), path)


def load_weights(
    opened: OpenedModel,
    ops: Ops,
    *,
    dtype: torch.dtype,
    device: torch.device,
    share: Share | None = None,
    progress: ProgressCallback | None = None,
) -> Decoder:
    """Read the weights of one rank's share (absent: all), in bounded memory beyond the weights themselves.

    Raises:
        ModelFormatError: a tensor is missing or has another shape.
        UnsupportedModelError: a tensor has a type that is not served, or is one that the family's layers do not use.
    """
    total, loaded = opened.source.total_bytes, 0

    def on_bytes(count: int) -> None:
        nonlocal loaded
        loaded += count
        if progress is not None:
            progress(LoadProgress(min(loaded, total), total))

    reader = WeightReader(opened.source, dtype, device, on_bytes)
    try:
        share = share or compute_share(opened.config)
        model = _LOADERS[opened.config.family](opened.config, share, reader, ops)
        _refuse_unread(opened, reader.read)
        return model
    finally:
        opened.source.close()


def _refuse_unread(opened: OpenedModel, read: set[str]) -> None:
    """Weights that nobody uses mean another model than the one that was built: its answers would be wrong, not late."""
    known = {"lm_head.weight", "output.weight"} if opened.config.tied_embeddings else set()
    unread = [name for name in opened.source.list_unread(read) if name not in known]
    unread = [name for name in unread if not name.endswith(_DERIVED)]
    if unread:
        raise UnsupportedModelError(
            f"{opened.path} holds {len(unread)} tensors that a {opened.config.family} model of "
            f"{opened.config.num_layers} layers does not use, such as {', '.join(sorted(unread)[:3])}: "
            "the configuration does not describe these weights, or this engine does not run them"
        )


def choose_dtype(wanted: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """Turn the configured dtype into torch's; `Auto` is the checkpoint's, and bfloat16 for float16 ones on a CPU."""
    named = {"BFloat16": torch.bfloat16, "Float16": torch.float16, "Float32": torch.float32}
    if wanted != "Auto":
        return named[wanted]
    if config.checkpoint_dtype in {"float32", "torch.float32"} and device.type == "cpu":
        return torch.float32
    if config.checkpoint_dtype in {"float16", "torch.float16"} and device.type != "cpu":
        return torch.float16
    return torch.bfloat16


def _find_gguf(path: Path) -> Path | None:
    if path.is_file():
        return path
    found = sorted(path.glob("*.gguf")) if path.is_dir() and not (path / "config.json").exists() else []
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:5])
        raise ModelFormatError(f"{path} holds several GGUF files ({names}); name one of them in model_path")
    return found[0] if found else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFormatError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelFormatError(f"{path} is not a JSON object")
    return data
