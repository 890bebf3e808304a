"""What a grammar is to those who schedule and step: something that takes tokens and knows when the text is complete.

Which tokens it allows is asked by whoever owns the library behind it (`engine.step.Masker`).
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class Guide(Protocol):
    """Where one sequence stands in its grammar. One thread owns it."""

    @property
    def failure(self) -> str:
        """Why it cannot go on; empty while it can."""
        ...

    def advance(self, token: int) -> bool:
        """Take the sequence's next token; True when nothing can follow it, be it for a failure."""
        ...


class Grammar(Protocol):
    """What a request's text must follow, checked and compiled. Any number of sequences may start from it."""

    @property
    def num_taken(self) -> int:
        """Tokens that its guides have taken: what it has derived for them is kept."""
        ...

    @property
    def failed(self) -> bool:
        """One of its guides could not go on."""
        ...

    def start(self) -> Guide:
        """The guide of a sequence without output."""
        ...


class TokenMasks(msgspec.Struct, frozen=True, gc=False):
    """Which tokens some rows may choose: one line of bits a row, the lowest bit first; what has no bit is not allowed."""

    rows: tuple[int, ...] = ()
    bits: bytes = b""
    """`[len(rows), row_bytes]`."""
    row_bytes: int = 0
