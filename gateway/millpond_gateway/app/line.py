"""The shape of one line of the access log."""

from __future__ import annotations

from typing import Final

import msgspec

_ENCODER: Final = msgspec.json.Encoder()


class Line(msgspec.Struct, omit_defaults=True, gc=False):
    """One line; what is absent is left out."""

    timestamp: str
    request_id: str
    method: str
    path: str
    pool: str
    status: int
    outcome: str
    attempts: int
    seconds: float
    bytes_in: int
    bytes_out: int
    stream: bool
    event: str
    level: str
    reason: str = ""
    tenant: str = ""
    traffic_class: str = ""
    endpoint: str = ""
    first_byte_seconds: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    estimated: bool = False


def encode_line(line: Line) -> bytes:
    """JSON of one line."""
    return _ENCODER.encode(line)
