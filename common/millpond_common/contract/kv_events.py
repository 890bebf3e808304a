"""Wire form of KV-cache events: what the engine publishes, and how replay and snapshot are asked for.

Frames of a live message (PUB): topic, sequence (8 bytes, big-endian), payload. The payload is msgpack of
`[seconds, events, rank]`; an event is a map with its tag under `type`. Block hashes are the routing keys of `blockkey`,
which `hash_scheme` says; prompts stay in the engine: whoever reaches the port learns neither tokens nor salts.

The array form, tag first, exists for consumers of vLLM's events that hash for themselves. It carries the tokens of
every prompt and answer in the cache, as vLLM's does.

Replay (ROUTER): ask `["", sequence]`, answered by one message `["", topic, sequence, payload]` per retained
batch from that sequence on, and an end marker with sequence 2**64 - 1 and an empty payload.

Snapshot (the same socket): ask `["", "snapshot"]`, answered by messages `["", topic, sequence, payload]` whose
events store all resident blocks, parents before children, and an end marker whose payload is a map with
`epoch` and `resume_sequence`: the first live sequence that the snapshot does not contain.

Heartbeats are events of their own message and use up a sequence, so that a lost message shows within a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from millpond_common.contract.blockkey import SCHEME_VERSION

END_SEQUENCE = (1 << 64) - 1
"""Sequence of the end marker of a replay or a snapshot."""
SNAPSHOT_REQUEST = b"snapshot"
TOPIC = b"kv-events"
HEARTBEAT_SECONDS = 1.0
DEVICE_MEDIUM = "GPU"
"""Medium of blocks that attention can read at once, on a CPU too: consumers know no other word for it."""

Form = Literal["map", "array"]


class EventStamp(msgspec.Struct, frozen=True):
    """Keys that every event carries beside its own."""

    epoch: str
    stored_total: int
    removed_total: int


class StoredBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive full blocks that became resident."""

    keys: tuple[int, ...]
    parent: int | None
    tokens: Sequence[int]
    block_tokens: int
    adapter: str = ""
    namespace: str = ""
    """Scope that salted the keys (`blockkey.make_namespace`)."""


class RemovedBlocks(msgspec.Struct, frozen=True):
    """Blocks that are gone."""

    keys: tuple[int, ...]


class ClearedBlocks(msgspec.Struct, frozen=True):
    """Nothing is resident any more."""


class Heartbeat(msgspec.Struct, frozen=True):
    """The publisher lives; `sequence` is the last one it used before this message."""

    sequence: int


KvEvent = StoredBlocks | RemovedBlocks | ClearedBlocks | Heartbeat


class SnapshotEnd(msgspec.Struct, frozen=True):
    """Payload of a snapshot's end marker."""

    epoch: str
    resume_sequence: int


def encode_sequence(sequence: int) -> bytes:
    """The second frame."""
    return sequence.to_bytes(8, "big")


def encode_batch(
    events: Sequence[KvEvent], stamp: EventStamp, *, seconds: float, rank: int = 0, form: Form = "map"
) -> bytes:
    """The payload of one message."""
    make = _make_map if form == "map" else _make_array
    return msgspec.msgpack.encode([seconds, [make(event, stamp) for event in events], rank])


def encode_snapshot_end(end: SnapshotEnd) -> bytes:
    """Payload of a snapshot's end marker."""
    return msgspec.msgpack.encode(end)


def decode_snapshot_end(payload: bytes) -> SnapshotEnd:
    """Read a snapshot's end marker.

    Raises:
        msgspec.DecodeError: when it is none.
    """
    return msgspec.msgpack.decode(payload, type=SnapshotEnd)


def _make_map(event: KvEvent, stamp: EventStamp) -> dict[str, Any]:
    common = {
        "epoch": stamp.epoch,
        "stored_total": stamp.stored_total,
        "removed_total": stamp.removed_total,
    }
    if isinstance(event, ClearedBlocks):
        return {"type": "AllBlocksCleared", **common}
    if isinstance(event, Heartbeat):
        return {"type": "Heartbeat", "sequence": event.sequence, **common}
    if isinstance(event, RemovedBlocks):
        return {"type": "BlockRemoved", "block_hashes": list(event.keys), "medium": DEVICE_MEDIUM, **common}
    made: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": list(event.keys),
        "parent_block_hash": event.parent,
        "token_ids": [],
        "block_size": event.block_tokens,
        "medium": DEVICE_MEDIUM,
        "hash_scheme": SCHEME_VERSION,
        **common,
    }
    if event.adapter:
        made["lora_name"] = event.adapter
    return made


def _make_array(event: KvEvent, stamp: EventStamp) -> list[Any]:
    del stamp  # positions are fixed: there is no place for it
    if isinstance(event, ClearedBlocks):
        return ["AllBlocksCleared"]
    if isinstance(event, Heartbeat):
        return ["Heartbeat", event.sequence]
    if isinstance(event, RemovedBlocks):
        return ["BlockRemoved", list(event.keys), DEVICE_MEDIUM]
    head = ["BlockStored", list(event.keys), event.parent, list(event.tokens), event.block_tokens]
    return [*head, None, DEVICE_MEDIUM, event.adapter or None, _make_extras(event)]


def _make_extras(event: StoredBlocks) -> list[list[str] | None] | None:
    """What separates the blocks from others with the same tokens, for consumers that hash for themselves."""
    adapter = [event.adapter] if event.adapter else []
    if not adapter and (not event.namespace or event.parent is not None):
        return None
    first = adapter + ([event.namespace] if event.namespace and event.parent is None else [])
    return [first or None] + [adapter or None] * (len(event.keys) - 1)
