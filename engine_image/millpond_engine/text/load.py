"""Choose the tokenizer that a path holds."""

from __future__ import annotations

from pathlib import Path

from millpond_engine.text.bytes_tokenizer import ByteTokenizer
from millpond_engine.text.tokenizer import Tokenizer, TokenizerError

BYTES = "bytes"


def load_tokenizer(source: str) -> Tokenizer:
    """Tokenizer of a GGUF file, of a directory, or of bytes.

    Raises:
        TokenizerError: nothing usable is there.
    """
    if source == BYTES:
        return ByteTokenizer()
    path = Path(source)
    # the libraries are imported late: the byte tokenizer needs neither
    if (path / "tokenizer.json").is_file():
        from millpond_engine.text.directory_tokenizer import load_directory_tokenizer  # noqa: PLC0415

        return load_directory_tokenizer(path)
    file = (
        path if path.is_file() else next(iter(sorted(path.glob("*.gguf"))), None) if path.is_dir() else None
    )
    if file is None:
        raise TokenizerError(
            f"{path}: no tokenizer found; give a GGUF file or a directory with tokenizer.json"
        )
    from millpond_engine.text.gguf_tokenizer import load_gguf_tokenizer  # noqa: PLC0415

    return load_gguf_tokenizer(file)
