"""Limits and deadlines of the relay; every queue, body, list and wait has one."""

from __future__ import annotations

from dataclasses import dataclass

from millpond_common.contract.openai import MAX_BODY_BYTES


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """What one relay process may hold and how long it may wait. Seconds, bytes, counts."""

    max_connections: int = 16_384
    """Client connections; past it a new one is answered 503 before anything is read."""
    max_requests: int = 8_192
    """Requests between head and last byte; past it 503 before the body is read."""
    max_head_bytes: int = 32_768
    max_headers: int = 100
    max_target_bytes: int = 4_096
    max_body_bytes: int = MAX_BODY_BYTES
    max_buffered_body_bytes: int = 256 * 1024 * 1024
    """All request bodies held at once, announced or read."""
    write_buffer_bytes: int = 65_536
    """Unsent bytes towards one client at which reading from its engine pauses."""

    head_seconds: float = 10.0
    """From a connection's first byte of a request to the end of its head."""
    body_seconds: float = 60.0
    """From the end of the head to the end of the body."""
    client_idle_seconds: float = 75.0
    """Keep-alive of an unused client connection."""
    stalled_client_seconds: float = 120.0
    """A client that reads nothing while bytes wait for it is cut off, since it holds an engine's blocks."""
    connect_seconds: float = 2.0
    first_byte_seconds: float = 300.0
    """From sending a request to an engine to its first answered byte."""
    idle_seconds: float = 120.0
    """Between two bytes of an engine's answer."""
    total_seconds: float = 3_600.0
    """From the end of the body to the end of the answer, holding included."""
    engine_idle_seconds: float = 4.0
    """Keep-alive towards engines: below the 5 s that common servers use, lowered further when an engine is seen to close earlier."""
    proof_seconds: float = 2.0
    """To find out whether a broken engine had started a request."""
    comment_seconds: float = 15.0
    """Silence after which a streaming client gets a server-sent comment; 0 sends none."""
    sweep_seconds: float = 0.1
    """How often deadlines are looked at: their resolution."""

    max_attempts: int = 3
    """Engines asked for one request, the first included."""
    max_overload_answer_bytes: int = 65_536
    """Body of an overload answer that is kept while another replica is asked."""
    hidden_usage: bool = True
    """Ask engines for the usage of streams whose clients did not, and keep it from those clients."""
    expose_decisions: bool = False
    """Answer with the replica and the score breakdown in debug headers."""
