"""Traces in the public Mooncake format: one JSON object a line with timestamp (milliseconds), input_length,
output_length (tokens) and hash_ids, one per block of 512 tokens, equal where the whole prefix is equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from millpond_gateway.routing.splitmix import mix64

BLOCK_TOKENS = 512


class TraceError(ValueError):
    """A line that is no request of the format; the message names file and line."""


class TraceRequest(msgspec.Struct, frozen=True):
    """One request of a trace."""

    timestamp: float
    """Milliseconds since the start."""
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    @property
    def block_keys(self) -> list[int]:
        """Keys of the full blocks; the file's ids name prefixes already, so mixing them is enough."""
        return [mix64(hash_id + 1) for hash_id in self.hash_ids[: self.input_length // BLOCK_TOKENS]]


_decoder = msgspec.json.Decoder(TraceRequest)
_encoder = msgspec.json.Encoder()


def read_trace(path: Path) -> list[TraceRequest]:
    """Requests of a file, in order of time.

    Raises:
        TraceError: when a line cannot be read.
    """
    requests: list[TraceRequest] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                requests.append(_decoder.decode(line))
            except msgspec.DecodeError as error:
                raise TraceError(f"{path}, line {number}: {error}") from error
    return sorted(requests, key=lambda request: request.timestamp)


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write requests, one a line."""
    with path.open("wb") as lines:
        for request in requests:
            lines.write(_encoder.encode(request) + b"\n")


def speed_up(requests: Iterable[TraceRequest], factor: float) -> list[TraceRequest]:
    """The same requests, `factor` times as dense."""
    return [msgspec.structs.replace(request, timestamp=request.timestamp / factor) for request in requests]


def compute_oracle_hit_rate(requests: Sequence[TraceRequest]) -> float:
    """Share of prompt tokens that one cache of infinite size, shared by the whole fleet, would have held."""
    seen: set[int] = set()
    hit_tokens = total_tokens = 0
    for request in requests:
        full = request.hash_ids[: request.input_length // BLOCK_TOKENS]
        num_hits = 0
        for hash_id in full:
            if hash_id not in seen:
                break
            num_hits += 1
        hit_tokens += min(num_hits * BLOCK_TOKENS, request.input_length - 1)
        total_tokens += request.input_length
        seen.update(full)
    return hit_tokens / total_tokens if total_tokens else 0.0
