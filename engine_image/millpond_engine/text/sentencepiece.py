"""SentencePiece vocabularies of GGUF files: pieces with scores, bytes for what no piece spells.

The file lists no merges: any two neighbours may be joined whose joint text is a piece, the one with the best
score first (Kudo & Richardson, EMNLP 2018). As a list of merges, in the order of scores, this is byte-pair
encoding, which the `tokenizers` library runs in compiled code.
"""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

SPACE = "\u2581"
"""Stands for a space in pieces."""


def make_sentencepiece(
    tokens: Sequence[str], scores: Sequence[float], *, unknown: str | None, add_space: bool
) -> tokenizers.Tokenizer:
    """Tokenizer of such a vocabulary; `add_space` puts a space before a text, as the models were trained."""
    vocabulary = {text: position for position, text in enumerate(tokens)}
    model = models.BPE(
        vocab=vocabulary,
        merges=list_merges(tokens, scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=SPACE, prepend_scheme="first" if add_space else "never", split=False
    )
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_space:
        steps.append(decoders.Strip(content=" ", left=1))
    made.decoder = decoders.Sequence(steps)
    return made


def list_merges(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, the best score first; of one piece, the longest left part first."""
    known = set(tokens)
    ranked: list[tuple[float, int, str, str]] = []
    for text, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in known and right in known:
                ranked.append((-score, -cut, left, right))
    ranked.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in ranked]
