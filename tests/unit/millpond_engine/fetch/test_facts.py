"""What the fetch step tells about a model's size is what the files hold."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.unit.millpond_engine.fetch.server import FileServer

from millpond_common.contract.model_facts import ModelFacts, parse_facts, read_termination
from millpond_engine.fetch import fetch_model, run_fetch
from millpond_engine.fetch.facts import make_facts, read_facts
from millpond_engine.fetch.model import run_inspect

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "torch_dtype": "float16",
}
EXACT = ModelFacts(
    num_parameters=150, dtype="Float16", num_layers=3, num_kv_heads=2, head_dim=16, max_model_tokens=512
)


def make_model(folder: Path) -> dict[str, bytes]:
    """Two shards of together 150 numbers."""
    folder.mkdir()
    save_file({"a": np.zeros((10, 10), np.float16)}, folder / "model-1.safetensors")
    save_file({"b": np.zeros((5, 10), np.float16)}, folder / "model-2.safetensors", metadata={"x": "y"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_directory_is_counted_from_its_headers(tmp_path: Path) -> None:
    make_model(tmp_path / "m")
    assert read_facts(tmp_path / "m") == EXACT


@pytest.mark.parametrize(
    "damage", ["model-1.safetensors", "config.json"], ids=["half a header", "no JSON in the configuration"]
)
def test_what_cannot_be_read_claims_nothing(tmp_path: Path, damage: str) -> None:
    files = make_model(tmp_path / "m")
    (tmp_path / "m" / damage).write_bytes(files[damage][:9])
    assert read_facts(tmp_path / "m") is None


def test_op_091_zero_is_never_a_size() -> None:
    assert make_facts(CONFIG, 0) is None
    assert make_facts({**CONFIG, "num_hidden_layers": 0}, 10) is None
    assert make_facts({}, 10) is None
    assert parse_facts({"numParameters": 1}) is None


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({}, 512),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 2048),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, 1024),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 512),
    ],
)
def test_the_context_is_the_engine_s(scaling: dict[str, object], context: int) -> None:
    from millpond_engine.model.rope import rope_from_hf

    facts = make_facts({**CONFIG, **scaling}, 1)
    assert facts is not None
    assert facts.max_model_tokens == context == rope_from_hf({**CONFIG, **scaling}).scaled_context(512)


def test_the_size_is_told_before_the_weights_are_fetched_and_exactly_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FileServer()
    server.add_hub_repository("owner/repo", "c0ffee", make_model(tmp_path / "m"))
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    said: list[tuple[str, int]] = []
    fetch_model(
        "hf://owner/repo", tmp_path / "to", say=lambda line: said.append((line, len(server.requests)))
    )
    ((early, num_requests),) = [entry for entry in said if entry[0].startswith("model ")]
    assert num_requests == 2, "after the listing and config.json, before any shard"
    facts = parse_facts(early.removeprefix("model "))
    assert facts is not None
    assert facts.num_parameters >= EXACT.num_parameters
    message = tmp_path / "termination-log"
    code = run_fetch(
        "hf://owner/repo", tmp_path / "to", revision=None, sha256=None, termination_message=message
    )
    server.close()
    assert code == 0
    assert read_termination(message.read_text()) == EXACT


def test_inspect_tells_what_is_here_and_names_what_is_not(tmp_path: Path) -> None:
    make_model(tmp_path / "m")
    message = tmp_path / "termination-log"
    assert run_inspect(tmp_path / "m", termination_message=message) == 0
    assert read_termination(message.read_text()) == EXACT
    assert run_inspect(tmp_path / "absent", termination_message=message) == 1
    told = json.loads(message.read_text())
    assert told["reason"] == "LocalFile"
    assert str(tmp_path / "absent") in told["message"]
    (tmp_path / "odd").mkdir()
    message.unlink()
    assert run_inspect(tmp_path / "odd", termination_message=message) == 0, (
        "the engine will say what is wrong"
    )
    assert not message.exists()


def test_a_quantized_file_counts_its_numbers_not_its_bytes(smollm2_gguf: Path) -> None:
    facts = read_facts(smollm2_gguf)
    assert facts == ModelFacts(
        num_parameters=134_515_008,
        dtype="BFloat16",
        num_layers=30,
        num_kv_heads=3,
        head_dim=64,
        max_model_tokens=8192,
    )
