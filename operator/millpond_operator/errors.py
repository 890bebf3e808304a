"""Everything the operator refuses or fails with.

    OperatorError
    ├── SettingsError            the operator's own flags or environment
    ├── NotLeaderError           a write was asked while another instance leads
    ├── KubeError                an answer of the API server
    │   ├── NotFoundError        404
    │   ├── ConflictError        409: another writer was faster, or the name is taken
    │   ├── ForbiddenError       401, 403: a permission is missing
    │   ├── InvalidObjectError   400, 422: the object is not acceptable
    │   ├── ThrottledError       429: with the wait the server asks for
    │   └── UnreachableError     5xx, time-out, or no connection at all
    └── GatewayCallError         a gateway's admin port did not answer as agreed

The caller logs the message as one line, so each says what happened, where, and what to do.
"""

from __future__ import annotations


class OperatorError(Exception):
    """Base of every error the operator raises on purpose."""


class SettingsError(OperatorError):
    """A flag or environment variable cannot be used."""


class NotLeaderError(OperatorError):
    """Another instance holds the Lease, so nothing may be written."""


class KubeError(OperatorError):
    """The API server refused or did not answer."""

    def __init__(self, message: str, *, status: int | None = None, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class NotFoundError(KubeError):
    """The object or the API does not exist."""


class ConflictError(KubeError):
    """The object changed meanwhile, another manager owns a field, or the name is taken."""


class ForbiddenError(KubeError):
    """The operator's role lacks a permission."""


class InvalidObjectError(KubeError):
    """The API server does not accept the object."""


class ThrottledError(KubeError):
    """The API server asks to wait."""

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message, status=429, reason="TooManyRequests")
        self.retry_after_seconds = retry_after_seconds


class UnreachableError(KubeError):
    """No answer, or a server error that may pass."""


class GatewayCallError(OperatorError):
    """A gateway's admin port refused, failed, or answered something else than agreed."""
