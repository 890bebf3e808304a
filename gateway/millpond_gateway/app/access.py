"""The access log: one JSON line per request, without prompts, written off the data loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import BinaryIO, Final

from millpond_gateway.app.line import Line, encode_line
from millpond_gateway.app.metrics import Metrics
from millpond_gateway.proxy.dispatch import Record

_MAX_LINES: Final = 20_000
_FLUSH_SECONDS: Final = 0.2
_PIECE_BYTES: Final = 4096
"""What a pipe takes undivided (PIPE_BUF of Linux)."""


class AccessLog:
    """Collects lines on the data loop; a thread writes them, so a slow reader of the log delays no request.

    The line has the shape of the structured log. It is encoded here directly: a logger's processor chain costs
    as much as relaying the request.
    """

    def __init__(self, stream: BinaryIO, metrics: Metrics) -> None:
        self._stream = stream
        self._metrics = metrics
        self._lines: list[bytes] = []
        self._clock = Clock()
        self._wake = threading.Event()
        self._stopping = False
        self._writer = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._writer.start()

    def write(self, record: Record, pool: str) -> None:
        """Add one line."""
        if len(self._lines) >= _MAX_LINES:
            self._metrics.log_lines_dropped.inc()
            return
        line = encode_line(make_line(record, pool, self._clock.format(time.time())))
        self._lines.append(line)  # found only now: the thread may have taken the list meanwhile

    def close(self) -> None:
        """Write what is left."""
        self._stopping = True
        self._wake.set()
        self._writer.join(timeout=2.0)

    def _run(self) -> None:
        while True:
            stopping = self._stopping
            lines, self._lines = self._lines, []
            for part in join_lines(lines):
                self._stream.write(part)
                self._stream.flush()
            if stopping:
                return
            self._wake.wait(_FLUSH_SECONDS)


def join_lines(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Whole lines in pieces that a pipe takes in one go, so that several workers may write to it."""
    piece = b""
    for line in lines:
        if piece and len(piece) + len(line) + 1 > _PIECE_BYTES:
            yield piece
            piece = b""
        piece += line + b"\n"
    if piece:
        yield piece


def make_line(record: Record, pool: str, timestamp: str) -> Line:
    """One finished request as a line."""
    usage, first = record.usage, record.first_byte_seconds
    return Line(
        timestamp,
        record.request_id,
        record.method,
        record.path,
        pool,
        record.status,
        record.outcome,
        record.attempts,
        round(record.seconds, 6),
        record.bytes_in,
        record.bytes_out,
        record.stream,
        "request",
        "info",
        record.reason,
        record.tenant,
        record.traffic_class,
        record.endpoint,
        round(first, 6) if first is not None else None,
        usage.prompt_tokens if usage is not None else None,
        usage.cached_tokens if usage is not None else None,
        usage.output_tokens if usage is not None else None,
        record.estimated,
    )


class Clock:
    """Timestamps of lines; the text of a second is made once."""

    def __init__(self) -> None:
        self._second = -1
        self._text = ""

    def format(self, unix_time: float) -> str:
        """ISO 8601, UTC, milliseconds."""
        second = int(unix_time)
        if second != self._second:
            self._second = second
            self._text = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        return f"{self._text}.{int((unix_time - second) * 1000):03d}Z"
