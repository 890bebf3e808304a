"""How a model is cut over ranks, and that a rank reads its own part of the files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond_engine.model.config import ModelConfig, parse_hf_config
from millpond_engine.model.errors import ModelFormatError, UnsupportedModelError
from millpond_engine.model.load import open_model
from millpond_engine.model.source import Piece
from millpond_engine.model.split import Span, compute_share

BASE = parse_hf_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 1536,
        "num_hidden_layers": 1,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
    }
)


def _shape(groups: int, group: int, inner: int, vocabulary: int) -> ModelConfig:
    return replace(
        BASE,
        num_heads=groups * group,
        num_kv_heads=groups,
        intermediate_size=inner,
        vocabulary_size=vocabulary,
    )


def test_nine_heads_in_three_groups_are_split_by_group() -> None:
    shares = [compute_share(BASE, rank, 2) for rank in (0, 1)]
    assert [share.heads for share in shares] == [Span(0, 6), Span(6, 3)]
    assert [share.kv_heads for share in shares] == [Span(0, 2), Span(2, 1)]
    assert [share.inner for share in shares] == [Span(0, 768), Span(768, 768)]
    assert [share.vocabulary for share in shares] == [Span(0, 24576), Span(24576, 24576)]


def test_more_ranks_than_groups_share_a_groups_key_value_head() -> None:
    shares = [compute_share(_shape(2, 4, 512, 100), rank, 4) for rank in range(4)]
    assert [share.kv_heads for share in shares] == [Span(0, 1), Span(0, 1), Span(1, 1), Span(1, 1)]
    assert [share.heads for share in shares] == [Span(0, 2), Span(2, 2), Span(4, 2), Span(6, 2)]


def test_more_ranks_than_heads_are_refused_with_the_number() -> None:
    with pytest.raises(UnsupportedModelError, match=r"10.* 9 attention heads"):
        compute_share(BASE, 0, 10)


@given(
    groups=st.integers(1, 9),
    group=st.integers(1, 8),
    size=st.integers(1, 9),
    inner=st.sampled_from([136, 1536, 11008, 14336, 768, 37]),
    vocabulary=st.sampled_from([211, 49152, 128256, 1000]),
)
def test_every_part_belongs_to_exactly_one_rank_and_heads_stay_with_their_group(
    groups: int, group: int, size: int, inner: int, vocabulary: int
) -> None:
    config = _shape(groups, group, inner, vocabulary)
    try:
        shares = [compute_share(config, rank, size) for rank in range(size)]
    except UnsupportedModelError:
        assert size > groups or inner < 64
        return
    for name, total in (("heads", config.num_heads), ("inner", inner), ("vocabulary", vocabulary)):
        spans: list[Span] = [getattr(share, name) for share in shares]
        covered = [index for span in spans for index in range(span.first, span.last)]
        assert covered == list(range(total)), name
    for share in shares:
        heads = range(share.heads.first, share.heads.last)
        assert {head // group for head in heads} == set(range(share.kv_heads.first, share.kv_heads.last))
        assert share.narrow(config).num_heads % share.narrow(config).num_kv_heads == 0


PIECES = [
    ("self_attn.q_proj", (576, 576), Span(384, 192), None),
    ("self_attn.k_proj", (192, 576), Span(64, 128), None),
    ("self_attn.o_proj", (576, 576), Span(0, 576), Span(384, 192)),
    ("mlp.down_proj", (576, 1536), Span(5, 100), Span(70, 333)),
    ("input_layernorm", (576,), Span(50, 30), None),
]


@pytest.mark.model
@pytest.mark.parametrize(("name", "shape", "rows", "columns"), PIECES)
def test_a_piece_of_either_format_is_that_part_of_the_whole(
    smollm2_gguf: Path,
    smollm2_float32: Path,
    name: str,
    shape: tuple[int, ...],
    rows: Span,
    columns: Span | None,
) -> None:
    import torch

    full = f"model.layers.3.{name}.weight"
    whole = torch.empty(shape)
    open_model(smollm2_float32).source.read_into(Piece(full, shape, Span(0, shape[0])), whole)
    expected = whole[rows.first : rows.last]
    if columns is not None:
        expected = expected[:, columns.first : columns.last]
    piece = Piece(full, shape, rows, columns)
    for path in (smollm2_gguf, smollm2_float32):
        found = torch.empty(piece.size)
        open_model(path).source.read_into(piece, found)
        assert torch.equal(found, expected), path


def test_a_piece_of_a_tensor_of_another_shape_is_refused(
    tiny_model: Callable[[str], tuple[Path, Any]],
) -> None:
    import torch

    source = open_model(tiny_model("llama")[0]).source
    with pytest.raises(ModelFormatError, match=r"\(72,\), expected \(80,\)"):
        source.read_into(Piece("model.norm.weight", (80,), Span(0, 10)), torch.empty(10))
