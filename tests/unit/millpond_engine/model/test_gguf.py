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


def _write_gguf(path: Path, arch: str = "llama", **changes: object) -> Path:
    """A file with the metadata of a small model and one tensor."""
    import gguf
    import numpy as np

    fields = {
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 128,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "context_length": 128,
        "vocab_size": 100,
    } | changes
    writer = gguf.GGUFWriter(path, arch)
    for key, value in fields.items():
        name = key if key.startswith(("split.", "general.")) else f"{arch}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_uint32(name, value)  # type: ignore[arg-type]
    writer.add_tensor("token_embd.weight", np.zeros((100, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("expert_count", 8, UnsupportedModelError),
        ("attention.sliding_window", 4096, UnsupportedModelError),
        ("rope.dimension_count", 8, UnsupportedModelError),
        ("attention.value_length", 8, UnsupportedModelError),
        ("attention.head_count", [4, 2], UnsupportedModelError),
        ("feed_forward_length", [128, 64], UnsupportedModelError),
        ("split.count", 3, UnsupportedModelError),
        ("rope.scaling.type", "longrope", UnsupportedModelError),
        ("attention.head_count", 0, ModelFormatError),
        ("attention.head_count_kv", 3, ModelFormatError),
        ("embedding_length", "wide", ModelFormatError),
        ("context_length", 0, ModelFormatError),
        ("general.alignment", 0, ModelFormatError),
    ],
)
def test_a_surprise_in_the_metadata_is_an_error_of_the_model_never_a_crash(
    tmp_path: Path, key: str, value: object, kind: type[Exception]
) -> None:
    open_model(_write_gguf(tmp_path / "good.gguf"))
    path = _write_gguf(tmp_path / "bad.gguf", **{key: value})
    with pytest.raises(kind):
        open_model(path)


def test_a_size_stated_for_each_layer_may_be_the_same_everywhere(tmp_path: Path) -> None:
    path = _write_gguf(tmp_path / "m.gguf", **{"attention.head_count": [4, 4]})
    assert open_model(path).config.num_heads == 4


def test_a_file_that_ends_early_or_has_a_type_nobody_knows_is_refused_before_anything_is_loaded(
    tmp_path: Path,
) -> None:
    path = _write_gguf(tmp_path / "m.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(ModelFormatError, match="ends inside tensor token_embd"):
        open_model(path)
    place = whole.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 2 * 8
    path.write_bytes(whole[:place] + b"\xc8\0\0\0" + whole[place + 4 :])
    with pytest.raises(UnsupportedModelError, match="unknown type 200"):
        open_model(path)
