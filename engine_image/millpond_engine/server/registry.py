"""What the engine knows about an `x-request-id`: open requests exactly, finished ones without ever forgetting.

Finished ids go into a Bloom filter (Bloom 1970): an id it denies was never seen in this epoch, which is the
promise a gateway needs to send a request elsewhere; one it affirms may be a stranger, which costs a retry.
"""

from __future__ import annotations

from typing import Literal

import xxhash

Phase = Literal["Unknown", "Waiting", "Running", "Finished"]

_BITS = 1 << 24
_NUM_HASHES = 4


class RequestRegistry:
    """Request ids of this epoch in constant memory (2 MiB). Owned by the event loop."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}
        self._waiting: set[str] = set()
        self._seen = bytearray(_BITS // 8)

    def open(self, request_id: str) -> None:
        """A request with this id is being read or served."""
        self._open[request_id] = self._open.get(request_id, 0) + 1
        self._waiting.add(request_id)

    def start(self, request_id: str) -> None:
        """Its first token has come."""
        self._waiting.discard(request_id)

    def close(self, request_id: str) -> None:
        """It is over, once per `open`; the id is remembered."""
        left = self._open.get(request_id, 1) - 1
        if left > 0:
            self._open[request_id] = left
            return
        self._open.pop(request_id, None)
        self._waiting.discard(request_id)
        for bit in _find_bits(request_id):
            self._seen[bit >> 3] |= 1 << (bit & 7)

    def get_phase(self, request_id: str) -> Phase:
        """Where a request is."""
        if request_id in self._open:
            return "Waiting" if request_id in self._waiting else "Running"
        seen = all(self._seen[bit >> 3] & (1 << (bit & 7)) for bit in _find_bits(request_id))
        return "Finished" if seen else "Unknown"


def _find_bits(request_id: str) -> list[int]:
    """Positions of an id, by double hashing."""
    digest = xxhash.xxh3_128_intdigest(request_id.encode())
    first, second = digest & ((1 << 64) - 1), digest >> 64 | 1
    return [(first + i * second) % _BITS for i in range(_NUM_HASHES)]
