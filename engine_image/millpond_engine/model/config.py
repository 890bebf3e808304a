"""The shape of a model, read from `config.json` or from GGUF metadata into one record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millpond_engine.model.errors import ModelFormatError, UnsupportedModelError
from millpond_engine.model.rope import RopeSettings, rope_from_gguf, rope_from_hf

HF_FAMILIES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
GGUF_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and constants of a decoder-only transformer."""

    family: str
    """llama, qwen2 or qwen3."""
    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary_size: int
    max_position_tokens: int
    """Longest sequence the model was made for, after rope scaling."""
    norm_eps: float
    rope: RopeSettings
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    checkpoint_dtype: str
    """Name of the torch dtype the weights were published in."""

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim


def parse_hf_config(data: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read `config.json` (and `generation_config.json` for the end tokens).

    Raises:
        UnsupportedModelError: unknown architecture, or a feature that is not built.
        ModelFormatError: a required key is missing.
    """
    family = _family(data.get("architectures") or [], HF_FAMILIES)
    _refuse_unsupported(data)
    try:
        hidden, heads = int(data["hidden_size"]), int(data["num_attention_heads"])
        rope = rope_from_hf(data)
        return ModelConfig(
            family=family,
            name=str(data.get("_name_or_path") or family),
            num_layers=int(data["num_hidden_layers"]),
            hidden_size=hidden,
            intermediate_size=int(data["intermediate_size"]),
            num_heads=heads,
            num_kv_heads=int(data.get("num_key_value_heads") or heads),
            head_dim=int(data.get("head_dim") or hidden // heads),
            vocabulary_size=int(data["vocab_size"]),
            max_position_tokens=rope.scaled_context(int(data.get("max_position_embeddings", 2048))),
            norm_eps=float(data.get("rms_norm_eps", 1e-6)),
            rope=rope,
            tied_embeddings=bool(data.get("tie_word_embeddings", False)),
            eos_token_ids=_token_ids((generation or {}).get("eos_token_id", data.get("eos_token_id"))),
            checkpoint_dtype=str(data.get("dtype") or data.get("torch_dtype") or "bfloat16"),
        )
    except KeyError as error:
        raise ModelFormatError(f"config.json lacks the key {error}") from error


def parse_gguf_metadata(fields: Mapping[str, Any]) -> ModelConfig:
    """Read GGUF metadata.

    Raises:
        UnsupportedModelError: unknown architecture.
        ModelFormatError: a required key is missing.
    """
    arch = str(fields.get("general.architecture", ""))
    family = _family([arch], GGUF_FAMILIES)
    try:
        hidden, heads = int(fields[f"{arch}.embedding_length"]), int(fields[f"{arch}.attention.head_count"])
        rope = rope_from_gguf(fields, arch)
        vocabulary = fields.get(f"{arch}.vocab_size") or fields["tokenizer.ggml.tokens"]
        return ModelConfig(
            family=family,
            name=str(fields.get("general.name") or family),
            num_layers=int(fields[f"{arch}.block_count"]),
            hidden_size=hidden,
            intermediate_size=int(fields[f"{arch}.feed_forward_length"]),
            num_heads=heads,
            num_kv_heads=int(fields.get(f"{arch}.attention.head_count_kv") or heads),
            head_dim=int(fields.get(f"{arch}.attention.key_length") or hidden // heads),
            vocabulary_size=vocabulary if isinstance(vocabulary, int) else len(vocabulary),
            max_position_tokens=rope.scaled_context(int(fields[f"{arch}.context_length"])),
            norm_eps=float(fields.get(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)),
            rope=rope,
            tied_embeddings=True,  # corrected by the loader when the file holds an output matrix
            eos_token_ids=_gguf_eos(fields),
            checkpoint_dtype="bfloat16",
        )
    except KeyError as error:
        raise ModelFormatError(f"the GGUF metadata lacks the key {error}") from error


def _family(names: list[str], known: Mapping[str, str]) -> str:
    for name in names:
        if name in known:
            return known[name]
    raise UnsupportedModelError(
        f"architecture {', '.join(names) or 'absent'} is not supported; supported: {', '.join(known)}"
    )


def _refuse_unsupported(data: Mapping[str, Any]) -> None:
    if data.get("use_sliding_window"):
        raise UnsupportedModelError("use_sliding_window is set: sliding window attention is not supported")
    if (data.get("quantization_config") or {}).get("quant_method"):
        raise UnsupportedModelError(
            "quantized safetensors are not supported; use the unquantized model or a GGUF file"
        )
    if data.get("mlp_bias"):
        raise UnsupportedModelError("mlp_bias is set: biases in the feed-forward layers are not supported")
    if str(data.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModelError(f"activation {data['hidden_act']} is not supported; only silu is")


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, (list, tuple)) else (int(value),)


def _gguf_eos(fields: Mapping[str, Any]) -> tuple[int, ...]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    return tuple(dict.fromkeys(int(fields[key]) for key in keys if fields.get(key) is not None))
