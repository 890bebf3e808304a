"""The one module that calls llguidance: vocabulary in, grammars compiled, masks computed.

llguidance walks the token trie with an Earley parser over a lexer of lazily derived automata (Koo, Liu, He, 2024;
"Making structured outputs go brrr", 2025): next to nothing is computed before a token needs it, and what is computed
stays with the grammar for all its sequences. Its calls let other threads run.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark

from millpond_engine.grammar.guide import CompiledGrammar, LibraryGuide, count_words
from millpond_engine.grammar.spec import WHITE_SPACE, GrammarError, GrammarKind, GrammarSpec, clean_message
from millpond_engine.records.grammar import Guide, TokenMasks
from millpond_engine.text.tokenizer import Tokenizer

LIMITS = llguidance.LLParserLimits(
    max_items_in_row=5_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=10_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
"""Work for one grammar and for one token of one sequence; beyond it a grammar does not compile or a sequence fails.

The items of a step are what keeps the worst token under half a second; those of any schema in use stay far below.
"""
_MAX_THREADS = 8
_SIDE_BY_SIDE = 32
"""Masks from which threads are worth waking: most take ten microseconds, and on a CPU the model's threads wait there."""


class Library:
    """Compiles grammars and fills masks over one vocabulary. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._made: tuple[tuple[int, tuple[int, ...]], llguidance.LLTokenizer] | None = None
        self._executor: llguidance.LLExecutor | None = None

    def compile(self, spec: GrammarSpec, *, vocabulary: int, ends: tuple[int, ...]) -> CompiledGrammar:
        """Compile for a model with so many tokens, of which `ends` end a text. Takes from 1 ms to seconds.

        Raises:
            GrammarError: it has errors, uses what is not supported, is too large, or allows no text.
        """
        tokenizer = self._get_tokenizer(vocabulary, ends)
        matcher = llguidance.LLMatcher(tokenizer, _translate(spec), log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise GrammarError(clean_message(matcher.get_error()))
        grammar = CompiledGrammar(matcher, vocabulary=vocabulary, ends=ends, keep_ends=spec.keep_ends)
        first = grammar.start()
        grammar.first_mask = first.look()
        if first.failure:
            raise GrammarError(clean_message(matcher.get_error()) if matcher.is_error() else first.failure)
        if first.is_over():
            raise GrammarError("it allows no text at all, or only the empty one")
        return grammar

    def make_masks(self, guides: Sequence[tuple[int, Guide]]) -> TokenMasks:
        """Masks of (row, guide) pairs, many of them computed side by side; the guides are all of this library."""
        mine = [guide for _, guide in guides if isinstance(guide, LibraryGuide)]
        assert len(mine) == len(guides), "a guide of another library"
        if not mine:
            return TokenMasks()
        words = max(guide.num_words for guide in mine)
        masks = np.zeros((len(mine), words), np.uint32)
        missing = [(guide.matcher, line) for line, guide in enumerate(mine) if not guide.looked]
        if len(missing) < _SIDE_BY_SIDE:
            for matcher, line in missing:
                matcher.unsafe_compute_mask_ptr(masks[line].ctypes.data, 4 * words)
        else:
            self._get_executor().unsafe_compute_mask_ptr(missing, masks.ctypes.data, 4 * words, len(mine))
        for line, guide in enumerate(mine):
            guide.take_mask(masks[line])
        return TokenMasks(tuple(row for row, _ in guides), masks.tobytes(), 4 * words)

    def _get_executor(self) -> llguidance.LLExecutor:
        """Made when first asked: its threads sleep when there is nothing to do."""
        if self._executor is None:
            self._executor = llguidance.LLExecutor(count_threads(os.environ))
        return self._executor

    def _get_tokenizer(self, vocabulary: int, ends: tuple[int, ...]) -> llguidance.LLTokenizer:
        """The vocabulary as the library wants it; a quarter of a second for 50,000 tokens, once."""
        with self._lock:
            if self._made is None or self._made[0] != (vocabulary, ends):
                self._made = ((vocabulary, ends), self._make_tokenizer(vocabulary, ends))
            return self._made[1]

    def _make_tokenizer(self, vocabulary: int, ends: tuple[int, ...]) -> llguidance.LLTokenizer:
        facts = self._tokenizer.facts
        size = count_words(vocabulary) * 32  # whole words: what is behind the vocabulary spells nothing
        marks = list(ends) or [
            size
        ]  # without an end token, one that no model has: only the grammar's end is left
        size += 0 if ends else 32
        words = _Words(self._tokenizer, size, vocabulary, marks[0], facts.special_token_ids)
        return llguidance.LLTokenizer(words, n_vocab=size, eos_token=marks)  # type: ignore[arg-type]  # reads these names


class _Words:
    """Bytes of every token, under the names that the library reads."""

    is_tokenizer_wrapper = True

    def __init__(
        self, tokenizer: Tokenizer, size: int, vocabulary: int, end: int, special: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = end
        self.bos_token_id = tokenizer.facts.bos_token_id
        self.tokens = [tokenizer.token_bytes(i) if i < vocabulary else b"" for i in range(size)]
        self.special_token_ids = sorted(token for token in special if token < vocabulary)

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def count_threads(environ: Mapping[str, str]) -> int:
    """Threads for masks: as many as the runner found for itself within the container's quota, and no more than help."""
    given = environ.get("OMP_NUM_THREADS", "")
    available = int(given) if given.isdigit() else len(os.sched_getaffinity(0))
    return max(1, min(_MAX_THREADS, available))


def _translate(spec: GrammarSpec) -> str:
    """The library's own form."""
    make: Any = llguidance.LLMatcher
    if spec.kind is GrammarKind.REGEX:
        return str(make.grammar_from_regex(spec.text))
    if spec.kind is GrammarKind.LARK:
        return str(make.grammar_from_lark(spec.text))
    if spec.kind is GrammarKind.EBNF:
        return str(make.grammar_from_lark(_read_ebnf(spec.text)))
    space: dict[str, Any] = {"whitespace_pattern": WHITE_SPACE}
    if spec.kind is GrammarKind.COMPACT_JSON_SCHEMA:
        space = {"whitespace_flexible": False}
    return str(make.grammar_from_json_schema(spec.text, overrides=space))


def _read_ebnf(text: str) -> str:
    try:
        return str(any_to_lark(text))
    except Exception as error:  # the converter raises what it meets
        raise GrammarError(clean_message(f"it is neither Lark nor EBNF: {error}")) from error
