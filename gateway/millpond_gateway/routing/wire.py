"""Wire form of shared decisions: msgpack arrays, tagged, bounded.

Every message names its origin (a gateway process) and the origin's epoch, a random number per start. A batch
carries consecutive messages of one origin: the i-th has sequence `first_sequence + i`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from sys import byteorder

import msgspec

from millpond_gateway.routing.records import Reservation, TenantHolds

MAX_KEYS = 8192
"""Keys of one shared reserve; what lies beyond is learned from KV events."""
MAX_HELD_TENANTS = 1024
"""Tenants of one told hold; those beyond are limited where they are held."""
MAX_MESSAGE_BYTES = 1 << 20
"""A longer message is refused unread."""
BATCH_BYTES = 256 * 1024
"""A batch is closed once it holds this much."""


class WireError(ValueError):
    """A peer's message that is too long or no message; drop the connection to that peer and connect again."""


class ForeignOriginError(WireError):
    """A message of one origin from a connection that proved to be another's."""


class Reserve(msgspec.Struct, frozen=True, array_like=True, tag="r", gc=False):
    """A replica was chosen."""

    pool: str
    id: int
    uid: str
    epoch: str | None
    uncached_tokens: int
    cached_tokens: int
    kv_blocks: int
    output_tokens: int
    session: int | None
    tenant: str
    tokens_per_key: float
    keys: bytes
    """Unsigned 64-bit little-endian block keys, at most MAX_KEYS."""
    budget_tokens: int = 0
    """0 from gateways that do not tell it."""

    @property
    def num_bytes(self) -> int:
        """Approximate size on the wire."""
        return 64 + len(self.pool) + len(self.uid) + len(self.tenant) + len(self.keys)


class FirstToken(msgspec.Struct, frozen=True, array_like=True, tag="f", gc=False):
    """The prefill part of a reservation is free."""

    pool: str
    id: int

    @property
    def num_bytes(self) -> int:
        """Approximate size on the wire."""
        return 16 + len(self.pool)


class Release(msgspec.Struct, frozen=True, array_like=True, tag="e", gc=False):
    """The reservation ended."""

    pool: str
    id: int
    used_tokens: int | None = None
    """Counted by the engine; None where it told nothing."""

    @property
    def num_bytes(self) -> int:
        """Approximate size on the wire."""
        return 16 + len(self.pool)


class Held(msgspec.Struct, frozen=True, array_like=True, tag="h", gc=False):
    """What one origin holds of a pool's requests now, not yet bound to a replica."""

    pool: str
    num_held: int
    tokens: int
    tenants: dict[str, int]
    """Requests by tenant, at most MAX_HELD_TENANTS."""
    tenant_tokens: dict[str, int] = {}
    claims: dict[str, tuple[int, int]] = {}

    @property
    def num_bytes(self) -> int:
        """Approximate size on the wire."""
        return 24 + len(self.pool) + 24 * (2 * len(self.tenants) + len(self.claims))


Decision = Reserve | FirstToken | Release | Held


class Batch(msgspec.Struct, frozen=True, array_like=True, tag="B"):
    """Consecutive decisions of one origin."""

    origin: str
    epoch: int
    first_sequence: int
    decisions: tuple[Decision, ...]


class ReplicaSum(msgspec.Struct, frozen=True, array_like=True):
    """What one origin has reserved on one replica of one pool."""

    pool: str
    uid: str
    queued_tokens: int
    kv_blocks: int
    num_open: int


class Digest(msgspec.Struct, frozen=True, array_like=True, tag="D"):
    """Where an origin stands; sent every second, so it is the heartbeat of the lease too."""

    origin: str
    epoch: int
    next_sequence: int
    sums: tuple[ReplicaSum, ...]


class AskRange(msgspec.Struct, frozen=True, array_like=True, tag="Q"):
    """Ask an origin for its decisions from a sequence on; it answers with batches or its full state."""

    asker: str
    epoch: int
    from_sequence: int


class OpenReservation(msgspec.Struct, frozen=True, array_like=True):
    """One reservation inside a full state."""

    reserve: Reserve
    decoding: bool


class FullState(msgspec.Struct, frozen=True, array_like=True, tag="S"):
    """Everything an origin has reserved at a sequence. Long states come in parts; only the last one is `final`."""

    origin: str
    epoch: int
    next_sequence: int
    first_part: bool
    final: bool
    reservations: tuple[OpenReservation, ...]
    holds: tuple[Held, ...] = ()


Message = Batch | Digest | AskRange | FullState

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode_message(message: Message) -> bytes:
    """Bytes for one peer connection; framing is the transport's."""
    return _encoder.encode(message)


def decode_message(data: bytes) -> Message:
    """Read one message.

    Raises:
        WireError: when it is longer than MAX_MESSAGE_BYTES or no message of this version.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"peer message of {len(data)} bytes exceeds {MAX_MESSAGE_BYTES}")
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"peer message is not readable: {error}") from error


def is_of(message: Message, sender: tuple[str, int]) -> bool:
    """Whether a message is of this origin and epoch."""
    if isinstance(message, AskRange):
        return message.asker == sender[0]
    return message.origin == sender[0] and message.epoch == sender[1]


def make_reserve(pool: str, reservation: Reservation, keys: Sequence[int]) -> Reserve:
    """Wire form of a reservation with the prompt's keys."""
    return Reserve(
        pool,
        reservation.id,
        reservation.uid,
        reservation.epoch,
        reservation.uncached_tokens,
        reservation.cached_tokens,
        reservation.kv_blocks,
        reservation.output_tokens,
        reservation.session,
        reservation.tenant,
        reservation.tokens_per_key,
        pack_keys(keys),
        reservation.budget_tokens,
    )


def make_held(pool: str, num_held: int, tokens: int, holds: TenantHolds) -> Held:
    """Wire form of what is held; tenants beyond the bound are limited where they are held."""
    most = MAX_HELD_TENANTS
    return Held(
        pool,
        num_held,
        tokens,
        dict(islice(holds.requests.items(), most)),
        dict(islice(holds.tokens.items(), most)),
        dict(islice(holds.claims.items(), most)),
    )


def make_reservation(reserve: Reserve, now: float) -> Reservation:
    """A peer's reservation as this process books it; times are by this process's clock."""
    return Reservation(
        id=reserve.id,
        request_id="",
        uid=reserve.uid,
        epoch=reserve.epoch,
        uncached_tokens=reserve.uncached_tokens,
        cached_tokens=reserve.cached_tokens,
        kv_blocks=reserve.kv_blocks,
        output_tokens=reserve.output_tokens,
        reserved_at=now,
        session=reserve.session,
        tenant=reserve.tenant,
        tokens_per_key=reserve.tokens_per_key,
        budget_tokens=reserve.budget_tokens,
    )


def pack_keys(keys: Sequence[int]) -> bytes:
    """Keys as little-endian bytes, cut at MAX_KEYS."""
    packed = array("Q", keys[:MAX_KEYS])
    if byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_keys(data: bytes) -> array[int]:
    """Keys from bytes; a ragged end is cut off."""
    keys = array("Q")
    keys.frombytes(data[: len(data) // 8 * 8])
    if byteorder == "big":
        keys.byteswap()
    return keys


def split_batches(
    origin: str, epoch: int, first_sequence: int, decisions: Sequence[Decision]
) -> Iterator[Batch]:
    """Batches of at most about BATCH_BYTES."""
    start = 0
    size = 0
    for position, decision in enumerate(decisions):
        if size and size + decision.num_bytes > BATCH_BYTES:
            yield Batch(origin, epoch, first_sequence + start, tuple(decisions[start:position]))
            start, size = position, 0
        size += decision.num_bytes
    if start < len(decisions):
        yield Batch(origin, epoch, first_sequence + start, tuple(decisions[start:]))
