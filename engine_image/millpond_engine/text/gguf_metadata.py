"""Key-value metadata of a GGUF file, read without touching the tensors (GGUF versions 2 and 3, little-endian).

Reference: the GGUF specification of the ggml project. Lengths come from the file and are bounded by it.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

from millpond_engine.text.tokenizer import TokenizerError

_MAGIC = b"GGUF"
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_MAX_KEYS = 10_000
_MAX_ITEMS = 4_000_000


def read_gguf_metadata(path: Path, *, prefixes: tuple[str, ...]) -> dict[str, Any]:
    """Values of all keys that begin with one of `prefixes`.

    Raises:
        TokenizerError: not a GGUF file, or cut short.
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        reader = _Reader(stream, size, path.name)
        if reader.take(4) != _MAGIC:
            raise TokenizerError(f"{path.name} is not a GGUF file")
        version = reader.scalar("<I")
        if version not in {2, 3}:
            raise TokenizerError(f"{path.name} is GGUF version {version}; versions 2 and 3 can be read")
        reader.scalar("<Q")  # number of tensors
        num_keys = reader.count(_MAX_KEYS)
        found: dict[str, Any] = {}
        for _ in range(num_keys):
            key = reader.string()
            value = reader.value(reader.scalar("<I"))
            if key.startswith(prefixes):
                found[key] = value
        return found


class _Reader:
    """Bounded reads of GGUF's primitive forms."""

    def __init__(self, stream: BinaryIO, size: int, name: str) -> None:
        self._stream = stream
        self._size = size
        self._name = name

    def take(self, length: int) -> bytes:
        if length > self._size:
            raise TokenizerError(f"{self._name} is damaged: a length exceeds the file")
        data = self._stream.read(length)
        if len(data) < length:
            raise TokenizerError(f"{self._name} is cut short")
        return data

    def scalar(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def count(self, limit: int) -> int:
        number = int(self.scalar("<Q"))
        if number > limit:
            raise TokenizerError(f"{self._name} is damaged: {number} entries where at most {limit} can be")
        return number

    def string(self) -> str:
        return self.take(int(self.scalar("<Q"))).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise TokenizerError(f"{self._name} is damaged: unknown value type {kind}")
        return self.scalar(_SCALARS[kind])

    def array(self) -> list[Any]:
        kind = self.scalar("<I")
        number = self.count(_MAX_ITEMS)
        if kind in _SCALARS:
            form = f"<{number}{_SCALARS[kind][1]}"
            return list(struct.unpack(form, self.take(struct.calcsize(form))))
        return [self.value(kind) for _ in range(number)]
