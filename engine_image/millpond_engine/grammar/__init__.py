"""Grammars of structured output: what they may be, compiled by llguidance, kept between requests.

Only `library` and what imports it know llguidance; `make_grammars` answers None where it is not installed.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from millpond_engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from millpond_engine.grammar.service import GrammarService

__all__ = ["make_grammars"]


def make_grammars(tokenizer: Tokenizer) -> GrammarService | None:
    """Grammars over a tokenizer's vocabulary, which is taken in when the first one is asked for."""
    if importlib.util.find_spec("llguidance") is None:
        return None
    # here, because an engine without the library runs all the same
    from millpond_engine.grammar.library import Library  # noqa: PLC0415
    from millpond_engine.grammar.service import GrammarService  # noqa: PLC0415

    return GrammarService(Library(tokenizer))
