"""Tokenizer from a GGUF file's metadata: byte-level BPE with the pre-tokenizer the file names, or SentencePiece.

Reference: `tokenizer.ggml.*` keys of the GGUF specification; the split patterns are those that the model
families publish in their tokenizer.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from millpond_engine.gguf_header import GgufHeaderError, read_gguf_header
from millpond_engine.text.hub_tokenizer import HubTokenizer
from millpond_engine.text.sentencepiece import make_sentencepiece
from millpond_engine.text.tokenizer import TokenizerError, TokenizerFacts

_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_END_TEXTS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>")
"""Texts of tokens that end a turn where a model's chat template writes them: its `eos_token_id` often ends documents."""


@dataclass(frozen=True, slots=True)
class _Split:
    """How text is cut before merging."""

    pattern: str | None
    """Absent: GPT-2's pattern, which byte-level pre-tokenization brings along."""
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False


_SPLITS = {
    "gpt-2": _Split(None),
    "smollm": _Split(None, single_digits=True),
    "llama-bpe": _Split(_LLAMA3_SPLIT, ignore_merges=True),
    "qwen2": _Split(_QWEN2_SPLIT, nfc=True),
}
_ALIASES = {
    "gpt2": "gpt-2",
    "default": "gpt-2",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
}


def load_gguf_tokenizer(path: Path) -> HubTokenizer:
    """Tokenizer, special tokens and chat template of a GGUF file.

    Raises:
        TokenizerError: damaged file, another tokenizer model, or a pre-tokenizer this engine does not know.
    """
    try:
        data = read_gguf_header(path).metadata
    except GgufHeaderError as error:
        raise TokenizerError(str(error)) from error
    kind = data.get("tokenizer.ggml.model")
    tokens: list[str] = data.get("tokenizer.ggml.tokens", [])
    if kind not in ("gpt2", "llama") or not tokens:
        message = "byte-level BPE (gpt2) and SentencePiece (llama) with a list of tokens are"
        raise TokenizerError(f"{path.name}: tokenizer model {kind!r} is not served; {message}")
    tokenizer = _load_pieces(path, data, tokens) if kind == "llama" else _load_byte_level(path, data, tokens)
    control = _add_tokens(tokenizer, tokens, data.get("tokenizer.ggml.token_type", []))
    _add_bos(tokenizer, tokens, data)
    return HubTokenizer(tokenizer, _make_facts(data, tokens, control), byte_level=kind == "gpt2")


def _load_byte_level(path: Path, data: dict[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    name = _find_split_name(data)
    split = _SPLITS.get(name)
    if split is None:
        known = ", ".join(sorted(_SPLITS))
        raise TokenizerError(f"{path.name}: pre-tokenizer {name!r} is not known; known are {known}")
    return _make_tokenizer(tokens, data.get("tokenizer.ggml.merges", []), split)


def _find_split_name(data: dict[str, Any]) -> str:
    name = str(data.get("tokenizer.ggml.pre", "default"))
    return _ALIASES.get(name, name)


def _load_pieces(path: Path, data: dict[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    scores = data.get("tokenizer.ggml.scores", [])
    if len(scores) != len(tokens):
        raise TokenizerError(
            f"{path.name}: {len(tokens)} tokens have {len(scores)} scores; a SentencePiece file has one each"
        )
    unknown = data.get("tokenizer.ggml.unknown_token_id")
    return make_sentencepiece(
        tokens,
        scores,
        unknown=tokens[unknown] if unknown is not None and unknown < len(tokens) else None,
        add_space=_adds_space(data),
    )


def _adds_space(data: dict[str, Any]) -> bool:
    """SentencePiece vocabularies put a space before a text unless the file says otherwise."""
    return data.get("tokenizer.ggml.model") == "llama" and bool(
        data.get("tokenizer.ggml.add_space_prefix", True)
    )


def _make_tokenizer(tokens: list[str], merges: list[str], split: _Split) -> tokenizers.Tokenizer:
    vocabulary = {text: position for position, text in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    made = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=split.ignore_merges, byte_fallback=False)
    )
    if split.nfc:
        made.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if split.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    return made


def _add_tokens(tokenizer: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> frozenset[int]:
    """Tell the tokenizer which tokens are never cut; returns the control tokens' ids."""
    control = [position for position, kind in enumerate(types) if kind == _CONTROL]
    user = [position for position, kind in enumerate(types) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in control])
    tokenizer.add_tokens([AddedToken(tokens[i], special=False, normalized=False) for i in user])
    return frozenset(control)


def _add_bos(tokenizer: tokenizers.Tokenizer, tokens: list[str], data: dict[str, Any]) -> None:
    bos = data.get("tokenizer.ggml.bos_token_id")
    # most files of these kinds have no flag, and their models were trained with the token in front
    by_default = data.get("tokenizer.ggml.model") == "llama" or _find_split_name(data) == "llama-bpe"
    if bos is not None and bos < len(tokens) and data.get("tokenizer.ggml.add_bos_token", by_default):
        text = tokens[bos]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{text} $A", pair=None, special_tokens=[(text, bos)]
        )


def _make_facts(data: dict[str, Any], tokens: list[str], control: frozenset[int]) -> TokenizerFacts:
    positions = {text: position for position, text in enumerate(tokens)}
    template = data.get("tokenizer.chat_template") or ""
    ends = [data.get("tokenizer.ggml.eos_token_id"), data.get("tokenizer.ggml.eot_token_id")]
    ends += [positions[text] for text in _END_TEXTS if positions.get(text) in control and text in template]
    variables = {}
    for short in ("bos", "eos", "unknown", "padding"):
        token_id = data.get(f"tokenizer.ggml.{short}_token_id")
        if token_id is not None and token_id < len(tokens):
            name = {"unknown": "unk", "padding": "pad"}.get(short, short)
            variables[f"{name}_token"] = tokens[token_id]
    return TokenizerFacts(
        vocabulary_size=len(tokens),
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        special_token_ids=control,
        bos_token_id=data.get("tokenizer.ggml.bos_token_id"),
        chat_template=data.get("tokenizer.chat_template"),
        tool_template=data.get("tokenizer.chat_template.tool_use"),
        template_variables=variables,
        adds_space=_adds_space(data),
    )
