"""The access log: one JSON line per request, without prompts, written off the data loop."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime
from typing import Any, BinaryIO

import msgspec

from millpond_gateway.app.metrics import Metrics
from millpond_gateway.proxy.dispatch import Record

_MAX_LINES = 20_000
_FLUSH_SECONDS = 0.2
_ENCODER = msgspec.json.Encoder()


class AccessLog:
    """Collects lines on the data loop; a thread writes them, so a slow reader of the log delays no request.

    The line has the shape of the structured log. It is encoded here directly: a logger's processor chain costs
    as much as relaying the request.
    """

    def __init__(self, stream: BinaryIO, metrics: Metrics) -> None:
        self._stream = stream
        self._metrics = metrics
        self._lines: list[bytes] = []
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    def write(self, record: Record, pool: str) -> None:
        """Add one line."""
        if len(self._lines) >= _MAX_LINES:
            self._metrics.log_lines_dropped.inc()
            return
        self._lines.append(_ENCODER.encode(make_line(record, pool, time.time())))

    def close(self) -> None:
        """Write what is left."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while True:
            stopping = self._stopping
            lines, self._lines = self._lines, []
            if lines:
                self._stream.write(b"\n".join(lines) + b"\n")
                self._stream.flush()
            if stopping:
                return
            self._wake.wait(_FLUSH_SECONDS)


def make_line(record: Record, pool: str, unix_time: float) -> dict[str, Any]:
    """Fields of one line; absent values are left out."""
    line: dict[str, Any] = {
        "timestamp": datetime.fromtimestamp(unix_time, UTC).isoformat(timespec="milliseconds"),
        "level": "info",
        "event": "request",
        "request_id": record.request_id,
        "method": record.method,
        "path": record.path,
        "pool": pool,
        "status": record.status,
        "outcome": record.outcome.value,
        "stream": record.stream,
        "attempts": record.attempts,
        "seconds": round(record.seconds, 6),
        "bytes_in": record.bytes_in,
        "bytes_out": record.bytes_out,
    }
    optional = {
        "reason": record.reason,
        "tenant": record.tenant,
        "class": record.traffic_class,
        "endpoint": record.endpoint,
    }
    line.update({name: value for name, value in optional.items() if value})
    if record.first_byte_seconds is not None:
        line["first_byte_seconds"] = round(record.first_byte_seconds, 6)
    if record.usage is not None:
        line["prompt_tokens"] = record.usage.prompt_tokens
        line["cached_tokens"] = record.usage.cached_tokens
        line["output_tokens"] = record.usage.output_tokens
    return line
