"""A tokenizer of the `tokenizers` library behind this engine's protocol: exact bytes for every token."""

from __future__ import annotations

import os
import re
from functools import lru_cache

import tokenizers

from millpond_engine.text.tokenizer import TokenizerFacts

# One text at a time is all there is to do: a pool of threads, one for each CPU of the node, would only sleep.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_HEX = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """Printable stand-ins of byte-level BPE, as GPT-2 chose them: printable bytes stand for themselves,
    the others for the characters from U+0100 up.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return alphabet | {chr(256 + position): byte for position, byte in enumerate(others)}


class HubTokenizer:
    """Wraps a `tokenizers.Tokenizer`; which bytes a token stands for depends on its decoder."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, facts: TokenizerFacts, *, byte_level: bool) -> None:
        self._tokenizer = tokenizer
        self._facts = facts
        self._bytes = _make_bytes(tokenizer, facts.vocabulary_size, byte_level=byte_level)

    @property
    def facts(self) -> TokenizerFacts:
        """Facts fixed at load time."""
        return self._facts

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of `text`."""
        # The library lets other threads run in its calls for many texts only: with `encode` a prompt of a
        # megabyte would hold the event loop and the steps of everybody else for as long as it takes.
        (encoding,) = self._tokenizer.encode_batch_fast(
            [_replace_surrogates(text)], add_special_tokens=add_special_tokens
        )
        ids: list[int] = encoding.ids
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token; empty for ids between the tokenizer's last and the model's last."""
        return self._bytes[token_id] if token_id < len(self._bytes) else b""


def _replace_surrogates(text: str) -> str:
    """Half characters, which JSON can spell and UTF-8 cannot, become U+FFFD."""
    return (
        text
        if text.isascii()
        else text.encode("utf-8", "replace").decode("utf-8")
        if _has_half(text)
        else text
    )


def _has_half(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text)


def _make_bytes(tokenizer: tokenizers.Tokenizer, size: int, *, byte_level: bool) -> list[bytes]:
    added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * max(size, len(vocabulary))
    spell = _spell_byte_level if byte_level else _spell_pieces
    for text, token_id in vocabulary.items():
        if token_id < len(table):
            table[token_id] = added[token_id].encode() if token_id in added else spell(text)
    return table


def _spell_byte_level(text: str) -> bytes:
    """Bytes of a byte-level token; one with a foreign character stands for itself."""
    alphabet = _byte_alphabet()
    try:
        return bytes(alphabet[char] for char in text)
    except KeyError:
        return text.encode()


def _spell_pieces(text: str) -> bytes:
    """Bytes of a SentencePiece token: U+2581 is a space, `<0xNN>` a byte."""
    byte = _HEX.fullmatch(text)
    return bytes([int(byte.group(1), 16)]) if byte else text.replace("\u2581", " ").encode()
