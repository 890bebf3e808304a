"""A compiled grammar and the guides of its sequences."""

from __future__ import annotations

from typing import Any

import llguidance
import numpy as np

from millpond_engine.records.step import RowFailure

Words = np.ndarray[Any, np.dtype[np.uint32]]


def count_words(vocabulary: int) -> int:
    """32-bit words of a mask."""
    return -(-vocabulary // 32)


class CompiledGrammar:
    """Shared by the sequences of its tenant: what one of them made the lexer derive, the others find derived."""

    def __init__(
        self, matcher: llguidance.LLMatcher, *, vocabulary: int, ends: tuple[int, ...], keep_ends: bool
    ) -> None:
        self._matcher = matcher
        self.keep_ends = keep_ends
        self.num_taken = 0
        self.failed = False
        self.first_mask: Words | None = None
        """Of a sequence without output, once it is known."""
        # one word more where the end is a token behind the vocabulary
        self.num_words = count_words(vocabulary) + (0 if ends else 1)
        self.end_bits = np.zeros(self.num_words, np.uint32)
        for end in ends or (32 * (self.num_words - 1),):
            self.end_bits[end // 32] |= np.uint32(1 << end % 32)

    def start(self) -> LibraryGuide:
        """The guide of a sequence without output; a copy of a few microseconds."""
        return LibraryGuide(self, self._matcher.deep_copy(), self.first_mask)


class LibraryGuide:
    """Where one sequence stands. A mask that was looked at early is kept for the next step."""

    def __init__(self, grammar: CompiledGrammar, matcher: llguidance.LLMatcher, mask: Words | None) -> None:
        self._grammar = grammar
        self.matcher = matcher
        self.failure = ""
        self._mask = mask

    @property
    def num_words(self) -> int:
        """32-bit words of its mask."""
        return self._grammar.num_words

    @property
    def looked(self) -> bool:
        """Its mask is known, or it has failed and has none."""
        return self._mask is not None or bool(self.failure)

    def advance(self, token: int) -> bool:
        """Take the next token; True when nothing can follow it."""
        self._mask = None
        self._grammar.num_taken += 1
        if not self.matcher.consume_token(token):
            self._fail()
            return True
        if self.matcher.is_stopped():
            return True
        # where the text may end: whether it must is known only to the mask
        return self.matcher.is_accepting() and self.is_over()

    def look(self) -> Words:
        """Compute the mask now."""
        if self._mask is None:
            mask = np.zeros(self.num_words, np.uint32)
            self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self._keep(mask)
        return self._mask if self._mask is not None else np.zeros(self.num_words, np.uint32)

    def is_over(self) -> bool:
        """No token but an end is left, or it has failed."""
        return not (self.look() & ~self._grammar.end_bits).any()

    def take_mask(self, mask: Words) -> None:
        """Take over a mask that was computed for this guide, or fill in the one it knows; shape it as asked for."""
        own = mask[: self.num_words]
        if not self.looked:
            self._keep(own.copy())
        own[:] = 0
        if self._mask is None:
            return
        rest = self._mask & ~self._grammar.end_bits
        own[:] = self._mask if self._grammar.keep_ends or not rest.any() else rest

    def _keep(self, mask: Words) -> None:
        if self.matcher.is_error():
            self._fail()
        else:
            self._mask = mask

    def _fail(self) -> None:
        self.failure = RowFailure.GRAMMAR
        self._grammar.failed = True
