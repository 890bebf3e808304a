"""Token masks as arrays, by row."""

from __future__ import annotations

from typing import Any

import numpy as np

from millpond_engine.records.grammar import TokenMasks

Array = np.ndarray[Any, np.dtype[Any]]


class RowMasks:
    """The masks of one step; a row without one chooses freely."""

    def __init__(self, masks: TokenMasks) -> None:
        self._lines = {row: line for line, row in enumerate(masks.rows)}
        self._bits = np.frombuffer(masks.bits, np.uint8).reshape(len(masks.rows), masks.row_bytes)

    def find(self, rows: Array) -> list[int]:
        """Which of these rows have a mask, by their place in `rows`."""
        return [place for place, row in enumerate(rows.tolist()) if row in self._lines] if self._lines else []

    def pack(self, rows: Array, vocabulary: int) -> Array:
        """Bits of rows that have a mask, uint8 `[num_rows, vocabulary / 8]`, the lowest bit first.

        Tokens that the model has and the mask does not are not allowed.
        """
        bits = self._bits[[self._lines[row] for row in rows.tolist()]]
        packed = np.zeros((len(rows), -(-vocabulary // 8)), np.uint8)
        common = min(packed.shape[1], bits.shape[1])
        packed[:, :common] = bits[:, :common]
        return packed

    def list_banned(self, rows: Array, vocabulary: int) -> Array:
        """What rows may not choose, bool `[num_rows, vocabulary]`; nothing where a row has no mask."""
        banned: Array = np.zeros((len(rows), vocabulary), np.bool_)
        masked = self.find(rows)
        packed = self.pack(rows[masked], vocabulary)
        banned[masked] = np.unpackbits(~packed, axis=1, bitorder="little", count=vocabulary).view(np.bool_)
        return banned


NO_MASKS = RowMasks(TokenMasks())
