"""Rotary frequencies of every variant against transformers' own functions."""

from __future__ import annotations

import pytest

from millpond_engine.model.errors import UnsupportedModelError
from millpond_engine.model.rope import compute_inverse_frequencies, rope_from_hf

CASES = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32768},
    "dynamic": {"factor": 2.0},
}


@pytest.mark.parametrize("kind", sorted(CASES))
def test_frequencies_equal_those_of_transformers(kind: str) -> None:
    import torch
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": kind, "rope_theta": 500000.0} | CASES[kind]
    config = transformers.LlamaConfig(
        hidden_size=512, num_attention_heads=4, max_position_embeddings=32768, rope_parameters=parameters
    )
    length = 65536
    expected, expected_factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    settings = rope_from_hf(config.to_dict())
    found, factor = compute_inverse_frequencies(settings, 128, length)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor)


def test_both_spellings_of_the_settings_are_read() -> None:
    old = rope_from_hf(
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}, "max_position_embeddings": 64}
    )
    new = rope_from_hf(
        {
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
            "max_position_embeddings": 64,
        }
    )
    assert old == new
    assert old.scaled_context(64) == 128


def test_an_unknown_variant_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="longrope"):
        rope_from_hf({"rope_scaling": {"rope_type": "longrope"}})
