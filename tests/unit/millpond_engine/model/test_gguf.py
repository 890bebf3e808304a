"""GGUF reading: the real file against transformers' decoding of it, and damaged files."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond_engine.gguf_header import GgufHeaderError, read_gguf_header
from millpond_engine.model.errors import ModelFormatError, UnsupportedModelError
from millpond_engine.model.load import open_model
from millpond_engine.model.source import Piece
from millpond_engine.model.split import Span


@pytest.mark.model
def test_every_tensor_decodes_to_what_transformers_decodes(smollm2_gguf: Path, smollm2_float32: Path) -> None:
    import torch

    ours, theirs = open_model(smollm2_gguf).source, open_model(smollm2_float32).source
    layers = [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.down_proj",
        "input_layernorm",
    ]
    names = [f"model.layers.{index}.{part}.weight" for index in (0, 17) for part in layers]
    for name in [*names, "model.embed_tokens.weight", "model.norm.weight"]:
        found, expected = torch.empty(ours.shape(name)), torch.empty(theirs.shape(name))
        ours.read_into(_whole(name, found.shape), found)
        theirs.read_into(_whole(name, found.shape), expected)
        assert torch.equal(found, expected), name


@pytest.mark.model
def test_the_shape_of_the_real_model(smollm2_gguf: Path) -> None:
    config = open_model(smollm2_gguf).config
    assert (config.family, config.num_layers, config.num_heads, config.num_kv_heads) == ("llama", 30, 9, 3)
    assert (config.hidden_size, config.intermediate_size, config.head_dim) == (576, 1536, 64)
    assert (config.vocabulary_size, config.max_position_tokens, config.rope.theta) == (49152, 8192, 100_000.0)
    assert config.tied_embeddings
    assert config.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty file"),
        (b"PK\x03\x04 a zip file of some length", "letters GGUF"),
        (b"GGUF\x01\0\0\0" + bytes(32), "version 1"),
    ],
)
def test_a_file_that_is_not_gguf_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(GgufHeaderError, match=words) as caught:
        read_gguf_header(path)
    assert "model.gguf" in str(caught.value)


@pytest.mark.model
@pytest.mark.parametrize("size", [100, 20_000, 1_900_000])
def test_a_truncated_header_is_a_format_error(tmp_path: Path, smollm2_gguf: Path, size: int) -> None:
    path = tmp_path / "model.gguf"
    with smollm2_gguf.open("rb") as file:
        path.write_bytes(file.read(size))
    with pytest.raises(ModelFormatError, match="fetch"):
        open_model(path).source.read_into(_whole("model.norm.weight", (576,)), _vector(576))


def _whole(name: str, shape: tuple[int, ...]) -> Piece:
    return Piece(name, tuple(shape), Span(0, shape[0]))


def _vector(size: int):  # type: ignore[no-untyped-def]  # torch is imported late
    import torch

    return torch.empty(size)


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="mamba"):
        open_model(tmp_path / "m.gguf")
