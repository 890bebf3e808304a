"""The chat templates of a model directory: one, a list of named ones, or files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from millpond_engine.text.load import load_tokenizer


def load_templates(path: Path, template: Any) -> tuple[str | None, str | None]:
    tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[])).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    facts = load_tokenizer(str(path)).facts
    return facts.chat_template, facts.tool_template


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (None, (None, None)),
        ("one", ("one", None)),
        ([], (None, None)),
        ([{"name": "default", "template": "one"}], ("one", None)),
        ([{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}], ("one", "two")),
        ([{"name": "tool_use", "template": 3}, "x", {}], (None, None)),
        (7, (None, None)),
    ],
)
def test_templates_of_the_configuration(tmp_path: Path, template: Any, found: tuple[str | None, ...]) -> None:
    assert load_templates(tmp_path, template) == found


def test_templates_in_files_come_first(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("one")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("two")
    assert load_templates(tmp_path, "other") == ("one", "two")


@pytest.mark.parametrize("rows", [None, "many", [3]])
def test_a_surprise_in_the_models_configuration_does_not_stop_the_tokenizer(
    tmp_path: Path, rows: Any
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": rows, "eos_token_id": None}))
    assert load_templates(tmp_path, "one") == ("one", None)
