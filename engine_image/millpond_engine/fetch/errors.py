"""Errors of fetching a model, each with a reason that ends up in the pod's termination message.

FetchError
├── SourceError         the source cannot be used as written (InvalidSource, NotSupported)
├── RefusedError        the other side says no for good (Unauthorized, NotFound, Refused)
├── UnreachableError    it did not answer, stalled, or failed after every retry (Unreachable, Stalled)
├── ChangedError        what arrived is not what was asked for (ChecksumMismatch)
└── LocalError          this side cannot hold it (DiskFull, LockTimeout, LocalFile)
"""

from __future__ import annotations

from enum import StrEnum


class FetchReason(StrEnum):
    """Why a fetch failed."""

    INVALID_SOURCE = "InvalidSource"
    NOT_SUPPORTED = "NotSupported"
    UNAUTHORIZED = "Unauthorized"
    NOT_FOUND = "NotFound"
    REFUSED = "Refused"
    UNREACHABLE = "Unreachable"
    STALLED = "Stalled"
    CHECKSUM_MISMATCH = "ChecksumMismatch"
    DISK_FULL = "DiskFull"
    LOCK_TIMEOUT = "LockTimeout"
    LOCAL_FILE = "LocalFile"


class FetchError(RuntimeError):
    """A model could not be fetched; the message says what, from where, and what to do."""

    def __init__(self, reason: FetchReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class SourceError(FetchError):
    """The source as written cannot be used."""


class RefusedError(FetchError):
    """The other side answered no; trying again would not help."""


class UnreachableError(FetchError):
    """No (complete) answer; worth another try."""

    def __init__(self, reason: FetchReason, message: str, retry_after_seconds: float = 0.0) -> None:
        super().__init__(reason, message)
        self.retry_after_seconds = retry_after_seconds


class ChangedError(FetchError):
    """The content is not what was promised."""


class LocalError(FetchError):
    """The local side failed."""
