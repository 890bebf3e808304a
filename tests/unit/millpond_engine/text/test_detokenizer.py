from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond_engine.text.bytes_tokenizer import ByteTokenizer
from millpond_engine.text.detokenizer import Detokenizer
from millpond_engine.text.tokenizer import decode

TOKENIZER = ByteTokenizer()
SAMPLES = ["ď", "🐎", "日本語", "👩\u200d👩\u200d👧", "a\u0301", "plain", "\u2028\u0085"]


def stream(tokens: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=skip)
    return [*[detokenizer.push([token]) for token in tokens], detokenizer.flush()]


@pytest.mark.parametrize("text", SAMPLES)
def test_eng_047_pieces_are_whole_characters_and_join_to_the_text(text: str) -> None:
    pieces = stream(TOKENIZER.encode(text, add_special_tokens=False))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert sum(piece != "" for piece in pieces) == len(text)  # each character comes with its last byte


@given(st.lists(st.integers(0, 258), max_size=60), st.booleans())
def test_eng_047_any_bytes_join_to_the_full_decode(tokens: list[int], skip: bool) -> None:
    assert "".join(stream(tokens, skip=skip)) == decode(TOKENIZER, tokens, skip_special_tokens=skip)


def test_a_cut_character_is_replaced_once_at_the_end() -> None:
    assert stream([0xF0, 0x9F]) == ["", "", "\ufffd"]


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    tokens = TOKENIZER.encode("a<|im_end|>b", add_special_tokens=False)
    assert "".join(stream(tokens)) == "ab"
    assert "".join(stream(tokens, skip=False)) == "a<|im_end|>b"
