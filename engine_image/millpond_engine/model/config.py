"""The shape of a model, read from `config.json` or from GGUF metadata into one record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millpond_engine.model.errors import ModelFormatError, UnsupportedModelError
from millpond_engine.model.fields import Fields
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

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelFormatError(
                f"{self.num_heads} attention heads do not divide into {self.num_kv_heads} groups of keys and values"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise UnsupportedModelError(f"heads of {self.head_dim} dimensions cannot be rotated in pairs")

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
        ModelFormatError: a required key is missing, or a value is not what its key needs.
    """
    names = data.get("architectures") or []
    family = _family([names] if isinstance(names, str) else names, HF_FAMILIES)
    _refuse_unsupported(data, family)
    fields = Fields(data, "config.json")
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    rope = rope_from_hf(data)
    return ModelConfig(
        family=family,
        name=str(data.get("_name_or_path") or family),
        num_layers=fields.count("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        num_heads=heads,
        num_kv_heads=fields.count("num_key_value_heads", heads),
        head_dim=fields.count("head_dim", hidden // heads),
        vocabulary_size=fields.count("vocab_size"),
        max_position_tokens=rope.scaled_context(fields.count("max_position_embeddings", 2048)),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        tied_embeddings=bool(data.get("tie_word_embeddings", False)),
        eos_token_ids=_token_ids((generation or {}).get("eos_token_id"))
        or _token_ids(data.get("eos_token_id")),
        checkpoint_dtype=str(data.get("dtype") or data.get("torch_dtype") or "bfloat16"),
    )


def parse_gguf_metadata(fields: Mapping[str, Any]) -> ModelConfig:
    """Read GGUF metadata.

    Raises:
        UnsupportedModelError: unknown architecture, or a feature that is not built.
        ModelFormatError: a required key is missing, or a value is not what its key needs.
    """
    arch = str(fields.get("general.architecture", ""))
    family = _family([arch], GGUF_FAMILIES)
    known = Fields(fields, "the GGUF metadata")
    hidden = known.count(f"{arch}.embedding_length")
    heads = _same_in_all_layers(fields, f"{arch}.attention.head_count", known)
    kv_key = f"{arch}.attention.head_count_kv"
    head_dim = known.count(f"{arch}.attention.key_length", max(1, hidden // heads))
    _refuse_unsupported_gguf(fields, arch, head_dim)
    rope = rope_from_gguf(fields, arch)
    tokens = fields.get("tokenizer.ggml.tokens")
    return ModelConfig(
        family=family,
        name=str(fields.get("general.name") or family),
        num_layers=known.count(f"{arch}.block_count"),
        hidden_size=hidden,
        intermediate_size=_same_in_all_layers(fields, f"{arch}.feed_forward_length", known),
        num_heads=heads,
        num_kv_heads=_same_in_all_layers(fields, kv_key, known) if fields.get(kv_key) else heads,
        head_dim=head_dim,
        vocabulary_size=known.count(f"{arch}.vocab_size", len(tokens) if tokens else None),
        max_position_tokens=rope.scaled_context(known.count(f"{arch}.context_length")),
        norm_eps=known.number(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6),
        rope=rope,
        tied_embeddings=True,  # corrected by the loader when the file holds an output matrix
        eos_token_ids=_gguf_eos(fields),
        checkpoint_dtype="bfloat16",
    )


def _same_in_all_layers(fields: Mapping[str, Any], key: str, known: Fields) -> int:
    """A size that GGUF may state for each layer: the one number it is everywhere."""
    value = fields.get(key)
    if not isinstance(value, list):
        return known.count(key)
    if len(set(value)) != 1:
        raise UnsupportedModelError(f"{key} differs among layers, which is not supported")
    return Fields({key: value[0]}, "the GGUF metadata").count(key)


def _family(names: list[str], known: Mapping[str, str]) -> str:
    for name in names:
        if name in known:
            return known[name]
    raise UnsupportedModelError(
        f"architecture {', '.join(names) or 'absent'} is not supported; supported: {', '.join(known)}"
    )


def _refuse_unsupported(data: Mapping[str, Any], family: str) -> None:
    kinds = data.get("layer_types") or ["full_attention"]
    if data.get("use_sliding_window") or any(kind != "full_attention" for kind in kinds):
        raise UnsupportedModelError(
            "use_sliding_window or layer_types ask for sliding window attention, which is not supported"
        )
    if data.get("attention_bias") and family != "qwen2":
        raise UnsupportedModelError("attention_bias is set: biases in the attention are not supported")
    if data.get("quantization_config") or data.get("compression_config"):
        raise UnsupportedModelError(
            "quantized safetensors are not supported; use the unquantized model or a GGUF file"
        )
    if data.get("mlp_bias"):
        raise UnsupportedModelError("mlp_bias is set: biases in the feed-forward layers are not supported")
    if str(data.get("hidden_act") or "silu") not in {"silu", "swish"}:  # two names of one function
        raise UnsupportedModelError(f"activation {data['hidden_act']} is not supported; only silu is")


def _refuse_unsupported_gguf(fields: Mapping[str, Any], arch: str, head_dim: int) -> None:
    if fields.get("split.count", 1) > 1:
        raise UnsupportedModelError(
            "the GGUF file is one part of several; join them with `llama-gguf-split --merge`"
        )
    if fields.get(f"{arch}.expert_count"):
        raise UnsupportedModelError("expert_count is set: mixtures of experts are not supported")
    if fields.get(f"{arch}.attention.sliding_window"):
        raise UnsupportedModelError("sliding_window is set: sliding window attention is not supported")
    for key in ("rope.dimension_count", "attention.value_length"):
        if fields.get(f"{arch}.{key}", head_dim) != head_dim:
            raise UnsupportedModelError(f"{key} differs from the head's {head_dim}, which is not supported")


def _token_ids(value: Any) -> tuple[int, ...]:
    """Ids in a list or alone; -1 and null, which some files write for none, are left out."""
    values = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0)


def _gguf_eos(fields: Mapping[str, Any]) -> tuple[int, ...]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    return tuple(dict.fromkeys(token for key in keys for token in _token_ids(fields.get(key))))
