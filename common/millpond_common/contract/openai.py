"""The OpenAI error shape and the codes Millpond's gateway and engine use.

Reference: the `code` is a string; clients recognise `context_length_exceeded` by its text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum

MAX_BODY_BYTES = 32 * 1024 * 1024
"""Default limit of a request body, the same at gateway and engine: what one passes the other takes."""


class ErrorCode(StrEnum):
    """Value of `error.code`; the pair (HTTP status, error type) of each is in ERROR_KINDS."""

    INVALID_VALUE = "invalid_value"
    UNSUPPORTED_FIELD = "unsupported_field"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    KV_CAPACITY_EXCEEDED = "kv_capacity_exceeded"
    INVALID_API_KEY = "invalid_api_key"
    PERMISSION_DENIED = "permission_denied"
    MODEL_NOT_FOUND = "model_not_found"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    REQUEST_TIMEOUT = "request_timeout"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    HEAD_TOO_LARGE = "head_too_large"
    SATURATED = "saturated"
    """Every replica is too busy for the request's class; a 429, since more replicas or patience help."""
    TENANT_CONCURRENCY = "tenant_concurrency"
    TENANT_TOKENS = "tenant_tokens"
    ENGINE_ERROR = "engine_error"
    NOT_IMPLEMENTED = "not_implemented"
    OVERLOADED = "overloaded"
    DRAINING = "draining"
    ASLEEP = "asleep"
    NO_REPLICA = "no_replica"
    COLD_START = "cold_start"
    REPLICA_FAILED = "replica_failed"
    DEADLINE_EXCEEDED = "deadline_exceeded"


ERROR_KINDS: dict[ErrorCode, tuple[int, str]] = {
    ErrorCode.INVALID_VALUE: (400, "BadRequestError"),
    ErrorCode.UNSUPPORTED_FIELD: (400, "BadRequestError"),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: (400, "BadRequestError"),
    ErrorCode.KV_CAPACITY_EXCEEDED: (400, "BadRequestError"),
    ErrorCode.INVALID_API_KEY: (401, "AuthenticationError"),
    ErrorCode.PERMISSION_DENIED: (403, "PermissionDeniedError"),
    ErrorCode.MODEL_NOT_FOUND: (404, "NotFoundError"),
    ErrorCode.NOT_FOUND: (404, "NotFoundError"),
    ErrorCode.METHOD_NOT_ALLOWED: (405, "BadRequestError"),
    ErrorCode.REQUEST_TIMEOUT: (408, "BadRequestError"),
    ErrorCode.PAYLOAD_TOO_LARGE: (413, "PayloadTooLarge"),
    ErrorCode.UNSUPPORTED_MEDIA_TYPE: (415, "BadRequestError"),
    ErrorCode.HEAD_TOO_LARGE: (431, "BadRequestError"),
    ErrorCode.SATURATED: (429, "RateLimitError"),
    ErrorCode.TENANT_CONCURRENCY: (429, "RateLimitError"),
    ErrorCode.TENANT_TOKENS: (429, "RateLimitError"),
    ErrorCode.ENGINE_ERROR: (500, "InternalServerError"),
    ErrorCode.NOT_IMPLEMENTED: (501, "NotImplementedError"),
    ErrorCode.OVERLOADED: (503, "ServiceUnavailableError"),
    ErrorCode.DRAINING: (503, "ServiceUnavailableError"),
    ErrorCode.ASLEEP: (503, "ServiceUnavailableError"),
    ErrorCode.NO_REPLICA: (503, "ServiceUnavailableError"),
    ErrorCode.COLD_START: (503, "ServiceUnavailableError"),
    ErrorCode.REPLICA_FAILED: (502, "BadGatewayError"),
    ErrorCode.DEADLINE_EXCEEDED: (504, "GatewayTimeoutError"),
}


@dataclass(frozen=True, slots=True)
class ApiError:
    """One refusal or failure as a client sees it."""

    code: ErrorCode
    message: str
    param: str | None = None
    retry_after_seconds: int | None = None
    """Sent as `retry-after`: at most 120 for what passes by waiting, since the OpenAI SDK does not retry beyond; of a
    pool at zero the rest of its measured start, however long."""

    @property
    def status(self) -> int:
        """HTTP status."""
        return ERROR_KINDS[self.code][0]

    def to_json(self) -> bytes:
        """Body `{"error": {...}}` in ASCII, so no line separator can split a server-sent event."""
        error = {
            "message": self.message,
            "type": ERROR_KINDS[self.code][1],
            "param": self.param,
            "code": self.code.value,
        }
        return json.dumps({"error": error}, separators=(",", ":")).encode()

    def to_event(self) -> bytes:
        """Server-sent error event that ends a broken stream; no `[DONE]` follows it."""
        return b"event: error\ndata: " + self.to_json() + b"\n\n"
