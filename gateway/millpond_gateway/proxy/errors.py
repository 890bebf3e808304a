"""Errors of the relay.

RelayError                the relay cannot go on with a connection
  BadRequestError              the client's fault: carries the answer; the connection is closed after it
  BadAnswerError               the engine's fault: bytes that are no HTTP answer
"""

from __future__ import annotations

from millpond_common.contract.openai import ApiError


class RelayError(Exception):
    """Base of this tree."""


class BadRequestError(RelayError):
    """A request that is refused before it is understood."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


class BadAnswerError(RelayError):
    """An engine broke the protocol; its connection is closed and its request has failed."""
