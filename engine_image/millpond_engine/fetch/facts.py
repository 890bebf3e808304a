"""The size of a model from its small parts: config.json and the tensors' headers, or a GGUF file's header; no torch.

What cannot be read gives None and no error: the engine will say what is wrong, and until then nothing is claimed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from millpond_common.contract.model_facts import BYTES, ModelFacts, WeightType, parse_facts
from millpond_engine.gguf_header import GgufHeaderError, read_gguf_header

CONFIG_NAME = "config.json"
WEIGHTS_SUFFIX = ".safetensors"
MAX_HEADER_BYTES = 100 << 20
"""Of a safetensors file; the format's own bound."""
_DTYPES: dict[str, WeightType] = {"float32": "Float32", "float16": "Float16", "bfloat16": "BFloat16"}


def read_facts(place: Path) -> ModelFacts | None:
    """Exact facts of a model that is here: a GGUF file, or a directory that holds one or safetensors."""
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    config = _read_json(place / CONFIG_NAME) if place.is_dir() else None
    if config is not None:
        counts = [_count_safetensors(path) for path in files if path.name.endswith(WEIGHTS_SUFFIX)]
        if not counts or None in counts:
            return None
        return make_facts(config, sum(count for count in counts if count is not None))
    found = [path for path in files if path.suffix == ".gguf"]
    return _read_gguf(found[0]) if len(found) == 1 else None


def estimate_facts(directory: Path, sizes: Iterable[tuple[str, int | None]]) -> ModelFacts | None:
    """Facts once config.json is there and the other files only have sizes; a size includes a header of a few KiB."""
    config = _read_json(directory / CONFIG_NAME)
    weights = [size for name, size in sizes if name.endswith(WEIGHTS_SUFFIX)]
    if config is None or not weights or None in weights:
        return None
    total = sum(size for size in weights if size is not None)
    return make_facts(config, total // BYTES[_find_dtype(config)])


def make_facts(config: Mapping[str, Any], num_parameters: int) -> ModelFacts | None:
    """Facts from a `config.json` and a count of parameters."""
    try:
        heads = int(config["num_attention_heads"])
        return parse_facts(
            {
                "numParameters": num_parameters,
                "dtype": _find_dtype(config),
                "numLayers": int(config["num_hidden_layers"]),
                "numKvHeads": int(config.get("num_key_value_heads") or heads),
                "headDim": int(config.get("head_dim") or int(config["hidden_size"]) // heads),
                "maxModelTokens": _find_context(config),
            }
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError):
        return None


def _find_dtype(config: Mapping[str, Any]) -> WeightType:
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return _DTYPES.get(name.removeprefix("torch."), "BFloat16")


def _find_context(config: Mapping[str, Any]) -> int:
    """Longest sequence; scaling that stretches the context counts, as in the engine's own reading."""
    plain = int(config.get("max_position_embeddings") or 2048)
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind, factor = scaling.get("rope_type") or scaling.get("type"), float(scaling.get("factor") or 1)
    original = int(scaling.get("original_max_position_embeddings") or 0)
    stretched = kind in ("linear", "dynamic") or (kind == "yarn" and original in (0, plain))
    return int(plain * max(1.0, factor)) if stretched else plain


def _read_json(path: Path) -> Mapping[str, Any] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _count_safetensors(path: Path) -> int | None:
    """Numbers in one file, from its header: eight bytes of length, then JSON with the shape of each tensor."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= MAX_HEADER_BYTES:
                return None
            header = json.loads(file.read(length))
        return sum(int(math.prod(entry["shape"])) for name, entry in header.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _read_gguf(path: Path) -> ModelFacts | None:
    try:
        header = read_gguf_header(path)
        fields, arch = header.metadata, str(header.metadata["general.architecture"])
        heads = int(fields[f"{arch}.attention.head_count"])
        return parse_facts(
            {
                "numParameters": sum(math.prod(entry.shape) for entry in header.tensors.values()),
                "dtype": "BFloat16",
                "numLayers": int(fields[f"{arch}.block_count"]),
                "numKvHeads": int(fields.get(f"{arch}.attention.head_count_kv") or heads),
                "headDim": int(
                    fields.get(f"{arch}.attention.key_length")
                    or int(fields[f"{arch}.embedding_length"]) // heads
                ),
                "maxModelTokens": int(fields[f"{arch}.context_length"]),
            }
        )
    except (OSError, GgufHeaderError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
