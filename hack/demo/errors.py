"""One error: a step that failed, with what to try."""

from __future__ import annotations


class DemoError(Exception):
    """A step cannot go on; `hint` says what to try."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
