"""Reading numbers out of a model's own description, which is data from the internet: null, text, zero, lists."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from millpond_engine.model.errors import ModelFormatError

_MAX_COUNT = 1 << 31


class Fields:
    """Values by key; null counts as absent, and every error names file and key."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self._data = data
        self._where = where

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1.

        Raises:
            ModelFormatError: absent without a default, or another value.
        """
        value = self._data.get(key)
        if value is None:
            if default is None:
                raise ModelFormatError(f"{self._where} lacks the key {key!r}")
            return default
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or not 1 <= value < _MAX_COUNT:
            raise ModelFormatError(
                f"{self._where}: {key} is {_show(value)}; a whole number of at least 1 is needed"
            )
        return int(value)

    def number(self, key: str, default: float) -> float:
        """A finite number of at least 0.

        Raises:
            ModelFormatError: another value.
        """
        value = self._data.get(key)
        if value is None:
            return default
        try:
            found = float(value)
        except (TypeError, ValueError):
            found = math.nan
        if not 0 <= found < math.inf:
            raise ModelFormatError(f"{self._where}: {key} is {_show(value)}; a number is needed")
        return found


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
