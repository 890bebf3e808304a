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
