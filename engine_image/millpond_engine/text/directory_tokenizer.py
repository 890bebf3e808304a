"""Tokenizer from a model directory: tokenizer.json, with special tokens and template from its neighbours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from millpond_engine.text.hub_tokenizer import HubTokenizer
from millpond_engine.text.tokenizer import TokenizerError, TokenizerFacts

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def load_directory_tokenizer(path: Path) -> HubTokenizer:
    """Tokenizer, special tokens and chat template of a directory in Hugging Face's layout.

    Raises:
        TokenizerError: tokenizer.json is missing or cannot be read.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(f"{path.name}: tokenizer.json is missing")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for every parse error
        raise TokenizerError(f"{path.name}: tokenizer.json cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings = _read_json(path / "tokenizer_config.json")
    special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    variables = _read_variables(settings)
    model = _read_json(path / "config.json")
    decoder, rows = json.loads(tokenizer.to_str()).get("decoder"), model.get("vocab_size")
    facts = TokenizerFacts(
        vocabulary_size=max(
            tokenizer.get_vocab_size(with_added_tokens=True), rows if isinstance(rows, int) else 0
        ),
        eos_token_ids=_find_ends(path, model, variables, tokenizer),
        special_token_ids=special,
        bos_token_id=tokenizer.token_to_id(variables.get("bos_token", "")),
        chat_template=_read_template(path, settings),
        tool_template=_read_tool_template(path, settings),
        template_variables=variables,
        adds_space=_takes_space(decoder),
    )
    return HubTokenizer(tokenizer, facts, byte_level=_is_byte_level(decoder))


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{file.name} cannot be read: {error}") from error
    return data if isinstance(data, dict) else {}


def _read_variables(settings: dict[str, Any]) -> dict[str, str]:
    variables = {}
    for name in _SPECIAL_NAMES:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            variables[name] = text
    return variables


def _find_ends(
    path: Path, model: dict[str, Any], variables: dict[str, str], tokenizer: tokenizers.Tokenizer
) -> tuple[int, ...]:
    """End tokens: those of generation_config.json and config.json, and the tokenizer's eos_token."""
    ends: list[int] = []
    for source in (_read_json(path / "generation_config.json"), model):
        value = source.get("eos_token_id")
        ends.extend(value if isinstance(value, list) else [value] if isinstance(value, int) else [])
    named = tokenizer.token_to_id(variables.get("eos_token", ""))
    if named is not None:
        ends.append(named)
    return tuple(dict.fromkeys(ends))


def _read_template(path: Path, settings: dict[str, Any]) -> str | None:
    """The template file, else the configuration's: a text, or a list in which `default` is meant."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    template = _list_templates(template).get("default") if isinstance(template, list) else template
    return template if isinstance(template, str) else None


def _read_tool_template(path: Path, settings: dict[str, Any]) -> str | None:
    """The template named `tool_use`, in a file of its own or in the configuration's list."""
    file = path / "additional_chat_templates" / "tool_use.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = _list_templates(settings.get("chat_template")).get("tool_use")
    return template if isinstance(template, str) else None


def _list_templates(templates: Any) -> dict[Any, Any]:
    listed = templates if isinstance(templates, list) else []
    return {item.get("name"): item.get("template") for item in listed if isinstance(item, dict)}


def _takes_space(decoder: Any) -> bool:
    """Decoding drops one space in front of a text, which encoding had put there."""
    if not isinstance(decoder, dict):
        return False
    kind = decoder.get("type")
    if kind == "Strip":
        return decoder.get("content") == " " and decoder.get("start") == 1
    if kind == "Metaspace":
        return decoder.get("prepend_scheme") != "never" and decoder.get("add_prefix_space") is not False
    return any(_takes_space(step) for step in decoder.get("decoders", []))


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    return decoder.get("type") == "ByteLevel" or any(_is_byte_level(d) for d in decoder.get("decoders", []))
