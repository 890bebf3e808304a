"""Header of a GGUF file, version 2 or 3: metadata and tensor table, without torch.

The `gguf` package's own reader makes an array view of every vocabulary entry, which takes seconds;
this one walks the header once. Quantized values are still decoded by that package.
Specification: ggml, docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_ENTRIES = 1 << 24
"""Of any count in a header; a larger one means a damaged file."""


class GgufHeaderError(ValueError):
    """The file is not GGUF, is damaged, or ends early; the message names the file."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies."""

    name: str
    shape: tuple[int, ...]
    """Row-major: `[outputs, inputs]`, the reverse of the order in the file."""
    type_id: int
    """Number of the ggml type."""
    offset: int
    """From the beginning of the file, in bytes."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Everything before the tensor data."""

    metadata: dict[str, Any]
    """Plain values by key; arrays are lists."""
    tensors: dict[str, TensorEntry]


def read_gguf_header(path: Path) -> GgufHeader:
    """Read metadata and tensor table.

    Raises:
        GgufHeaderError: the file is not a whole GGUF file.
        OSError: it cannot be opened.
    """
    with path.open("rb") as file:
        try:
            return _parse(file)
        except (struct.error, LookupError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
            raise GgufHeaderError(f"{path} is not a readable GGUF file: {error}") from error


class _Cursor:
    """A position in the mapped file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def scalar(self, code: str) -> Any:
        values = struct.unpack_from("<" + code, self._data, self.position)
        self.position += struct.calcsize("<" + code)
        return values[0]

    def count(self, what: str) -> int:
        value = int(self.scalar("Q"))
        if value > _MAX_ENTRIES:
            raise ValueError(f"{what} claims {value} entries")
        return value

    def string(self) -> str:
        length = self.count("a string")
        raw = self._data[self.position : self.position + length]
        if len(raw) != length:
            raise ValueError("the file ends inside a string")
        self.position += length
        return raw.decode("utf-8")

    def value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self.string()
        if type_id != _ARRAY:
            return self.scalar(_SCALARS[type_id])
        item, length = self.scalar("I"), self.count("an array")
        if item in (_STRING, _ARRAY):
            return [self.value(item) for _ in range(length)]
        values = struct.unpack_from(f"<{length}{_SCALARS[item]}", self._data, self.position)
        self.position += struct.calcsize(f"<{length}{_SCALARS[item]}")
        return list(values)


def _parse(file: BinaryIO) -> GgufHeader:
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != MAGIC:
            raise ValueError("it does not begin with the letters GGUF")
        cursor = _Cursor(data)
        cursor.position = 4
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not supported (2 and 3 are)")
        num_tensors, num_fields = cursor.count("the tensor table"), cursor.count("the metadata")
        metadata = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(num_fields)}
        entries = [_tensor_entry(cursor) for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", 32))
        start = -(-cursor.position // alignment) * alignment
    placed = (TensorEntry(e.name, e.shape, e.type_id, e.offset + start) for e in entries)
    return GgufHeader(metadata, {entry.name: entry for entry in placed})


def _tensor_entry(cursor: _Cursor) -> TensorEntry:
    name = cursor.string()
    dimensions = [int(cursor.scalar("Q")) for _ in range(cursor.scalar("I"))]
    type_id, offset = cursor.scalar("I"), int(cursor.scalar("Q"))
    return TensorEntry(name, tuple(reversed(dimensions)), type_id, offset)
