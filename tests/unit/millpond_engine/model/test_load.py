"""Opening model folders: what is refused, and the memory and progress of loading."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millpond_engine.model.config import parse_hf_config
from millpond_engine.model.errors import ModelFormatError, UnsupportedModelError
from millpond_engine.model.load import load_weights, open_model
from millpond_engine.model.safetensors_source import INDEX_NAME


def _base() -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "eos_token_id": [7, 8],
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"use_sliding_window": True}, "sliding"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"partial_rotary_factor": 0.5}, "partial"),
    ],
)
def test_what_the_engine_cannot_run_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    parse_hf_config(_base())
    with pytest.raises(UnsupportedModelError, match=words):
        parse_hf_config(_base() | change)


def test_a_missing_key_is_named() -> None:
    data = _base()
    del data["vocab_size"]
    with pytest.raises(ModelFormatError, match="vocab_size"):
        parse_hf_config(data)


def test_end_tokens_come_from_the_generation_config_first() -> None:
    assert parse_hf_config(_base()).eos_token_ids == (7, 8)
    assert parse_hf_config(_base(), {"eos_token_id": 9}).eos_token_ids == (9,)


def test_a_folder_without_a_model_says_what_to_check(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="model_path"):
        open_model(tmp_path)
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelFormatError, match=r"a\.gguf, b\.gguf"):
        open_model(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path, tiny_model: Callable[[str], tuple[Path, Any]]) -> None:
    directory, _ = tiny_model("llama")
    for path in directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    shards[1].unlink()
    with pytest.raises(ModelFormatError, match=shards[1].name):
        open_model(tmp_path)


def test_a_tensor_of_another_shape_is_a_format_error(
    tmp_path: Path, tiny_model: Callable[[str], tuple[Path, Any]]
) -> None:
    import torch

    from millpond_engine.kernels.reference import ReferenceOps

    directory, _ = tiny_model("llama")
    for path in directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 4096}))
    with pytest.raises(ModelFormatError, match="4096"):
        load_weights(open_model(tmp_path), ReferenceOps(), dtype=torch.float32, device=torch.device("cpu"))


def test_progress_counts_every_byte_once(tiny_model: Callable[[str], tuple[Path, Any]]) -> None:
    import torch

    from millpond_engine.kernels.reference import ReferenceOps

    steps = []
    load_weights(
        open_model(tiny_model("qwen3")[0]),
        ReferenceOps(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        progress=steps.append,
    )
    loaded = [step.loaded_bytes for step in steps]
    assert loaded == sorted(loaded)
    assert 0.9 < loaded[-1] / steps[-1].total_bytes <= 1.0


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"architectures": None}, UnsupportedModelError),
        ({"layer_types": ["sliding_attention", "full_attention"]}, UnsupportedModelError),
        ({"architectures": ["LlamaForCausalLM"], "attention_bias": True}, UnsupportedModelError),
        ({"quantization_config": {"bits": 4}}, UnsupportedModelError),
        ({"quantization_config": "fp8"}, UnsupportedModelError),
        ({"rope_scaling": "linear"}, UnsupportedModelError),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, UnsupportedModelError),
        ({"head_dim": 7}, UnsupportedModelError),
        *[
            ({key: value}, ModelFormatError)
            for key in ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "head_dim")
            for value in (0, -1, 1.5, "many", True, [4])
        ],
        ({"hidden_size": None}, ModelFormatError),
        ({"num_key_value_heads": 3}, ModelFormatError),
        ({"max_position_embeddings": 0}, ModelFormatError),
        ({"rms_norm_eps": "small"}, ModelFormatError),
        ({"rope_theta": float("nan")}, ModelFormatError),
        ({"rope_scaling": {"type": "linear", "factor": "four"}}, ModelFormatError),
    ],
)
def test_a_surprise_in_the_configuration_is_an_error_of_the_model_never_a_crash(
    change: dict[str, Any], kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        parse_hf_config(_base() | change)


def test_null_means_absent_and_one_architecture_may_stand_alone() -> None:
    optional = (
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "partial_rotary_factor",
        "hidden_act",
        "tie_word_embeddings",
        "torch_dtype",
        "quantization_config",
    )
    nulls = dict.fromkeys(optional)
    assert parse_hf_config(_base() | nulls) == parse_hf_config(_base())
    assert parse_hf_config(_base() | {"architectures": "Qwen2ForCausalLM", "hidden_act": "swish"}) == (
        parse_hf_config(_base())
    )


def test_end_tokens_left_out_of_the_generation_config_are_those_of_the_configuration() -> None:
    for none in (None, [], -1, [None]):
        assert parse_hf_config(_base(), {"eos_token_id": none}).eos_token_ids == (7, 8)


def _copy(source: Path, target: Path) -> Path:
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def _load(directory: Path) -> Any:
    import torch

    from millpond_engine.kernels.reference import ReferenceOps

    return load_weights(
        open_model(directory), ReferenceOps(), dtype=torch.float32, device=torch.device("cpu")
    )


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": null}'])
def test_a_broken_index_of_weights_is_a_format_error(
    tmp_path: Path, tiny_model: Callable[[str], tuple[Path, Any]], content: str
) -> None:
    directory = _copy(tiny_model("llama")[0], tmp_path)
    (directory / INDEX_NAME).write_text(content)
    with pytest.raises(ModelFormatError, match="index"):
        open_model(directory)


def test_an_index_that_names_the_wrong_file_is_a_format_error(
    tmp_path: Path, tiny_model: Callable[[str], tuple[Path, Any]]
) -> None:
    directory = _copy(tiny_model("llama")[0], tmp_path)
    index = json.loads((directory / INDEX_NAME).read_text())
    first = index["weight_map"]["model.embed_tokens.weight"]
    index["weight_map"]["model.norm.weight"] = first
    (directory / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(ModelFormatError, match=r"model\.norm\.weight"):
        _load(directory)


def _rewrite(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Put all tensors, changed, into one file."""
    from safetensors.torch import load_file, save_file

    tensors: dict[str, Any] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
        path.unlink()
    (directory / INDEX_NAME).unlink()
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.o_proj.bias", "model.layers.3.mlp.up_proj.weight"]
)
def test_weights_that_no_layer_uses_are_refused_because_answers_would_be_wrong(
    tmp_path: Path, tiny_model: Callable[[str], tuple[Path, Any]], name: str
) -> None:
    import torch

    directory = _copy(tiny_model("llama")[0], tmp_path)
    _rewrite(directory, lambda tensors: tensors.update({name: torch.zeros(3)}))
    with pytest.raises(UnsupportedModelError, match=name):
        _load(directory)


def test_weights_that_follow_from_the_configuration_may_be_in_the_file(
    tmp_path: Path, tiny_model: Callable[[str], tuple[Path, Any]]
) -> None:
    import torch

    directory = _copy(tiny_model("llama-tied")[0], tmp_path)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3), "lm_head.weight": torch.zeros(3)}
    _rewrite(directory, lambda tensors: tensors.update(extra))
    (directory / "adapter_model.safetensors").write_bytes(b"an adapter that lies beside the model")
    _load(directory)


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
def test_quantized_weights_without_their_scales_are_refused(
    tmp_path: Path, tiny_model: Callable[[str], tuple[Path, Any]], kind: str
) -> None:
    import torch

    directory = _copy(tiny_model("llama")[0], tmp_path)

    def quantize(tensors: dict[str, Any]) -> None:
        name = "model.layers.1.mlp.up_proj.weight"
        tensors[name] = tensors[name].to(getattr(torch, kind))

    _rewrite(directory, quantize)
    with pytest.raises(UnsupportedModelError, match="up_proj"):
        _load(directory)
