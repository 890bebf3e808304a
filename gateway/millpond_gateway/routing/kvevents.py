"""Decoding of KV-event payloads, in both encodings of the field and with Millpond's additions.

A batch is `[ts, events, rank]` or a map with these names. An event is an array with the tag first, or a map with
the tag under `type`. Unknown tags, keys and extra positions are ignored; one bad event is counted and the rest of
the batch kept. Specification: vLLM 0.32 `distributed/kv_events.py`, SGLang 0.5.23 `disaggregation/kv_events.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from millpond_common.contract.kv_events import END_SEQUENCE

_U64 = (1 << 64) - 1
_STORED_FIELDS = (
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
_REMOVED_FIELDS = ("type", "block_hashes", "medium", "group_idx")
_FIELDS = {"BlockStored": _STORED_FIELDS, "BlockRemoved": _REMOVED_FIELDS, "AllBlocksCleared": ("type",)}
MAX_PAYLOAD_BYTES = 64 * 1024 * 1024


class PayloadError(ValueError):
    """A payload that is no event batch: count it, lower the replica's confidence, and read on."""


class Tier(StrEnum):
    """Where a block lies."""

    DEVICE = "Device"
    HOST = "Host"
    DISK = "Disk"
    UNKNOWN = "Unknown"
    """A medium nobody configured: worth nothing."""


_TIERS: dict[str | None, Tier] = {
    None: Tier.DEVICE,  # first releases had no medium
    "GPU": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "STORAGE": Tier.DISK,
    "DISK": Tier.DISK,
    "EXTERNAL": Tier.DISK,
}


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive blocks became resident."""

    hashes: tuple[int, ...]
    parent: int | None
    tokens: tuple[int, ...]
    block_tokens: int
    tier: Tier
    adapter: str
    namespace: str
    """Salt or tenant that scoped the blocks."""
    extras: tuple[bytes, ...]
    """Per block: what else its identity depends on, images for one; empty means nothing."""
    group: int
    window_tokens: int | None
    reuse: bool
    scheme: int | None
    """Version of the shared routing key when the hashes are routing keys."""


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks are gone from a tier; `tier` None means from the device."""

    hashes: tuple[int, ...]
    tier: Tier
    group: int


class Cleared(msgspec.Struct, frozen=True):
    """The replica holds nothing any more."""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """The publisher lives, and this is the last sequence it sent."""

    sequence: int | None


Event = Stored | Removed | Cleared | Heartbeat


class EventBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One decoded payload."""

    events: tuple[Event, ...]
    num_bad: int
    """Events that could not be read or whose tokens do not match their blocks."""
    epoch: str | None
    rank: int


_decoder = msgspec.msgpack.Decoder()


def parse_live_frames(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Sequence and payload of a published message `[topic, sequence, payload]`.

    The topic names nobody: streams belong to connections, and two pods may use one topic.

    Raises:
        PayloadError: when the frames have another shape.
    """
    if len(frames) != 3 or len(frames[1]) != 8:
        raise PayloadError(f"expected topic, 8-byte sequence and payload, got {len(frames)} frames")
    return int.from_bytes(frames[1], "big"), frames[2]


def parse_replay_frames(frames: Sequence[bytes]) -> tuple[int, bytes] | None:
    """Sequence and payload of a replayed message, `[seq, payload]` or `[topic, seq, payload]`; None at the end marker.

    An empty delimiter before them is skipped.

    Raises:
        PayloadError: when the frames have another shape.
    """
    rest = list(frames)
    if rest and not rest[0] and len(rest) > 2 and (len(rest) > 3 or len(rest[1]) == 8):
        rest = rest[1:]
    if len(rest) == 3:
        rest = rest[1:]
    if len(rest) != 2 or len(rest[0]) != 8:
        raise PayloadError(f"expected a replayed sequence and payload, got {len(frames)} frames")
    sequence = int.from_bytes(rest[0], "big")
    return None if sequence == END_SEQUENCE else (sequence, rest[1])


def decode_batch(payload: bytes) -> EventBatch:
    """Decode one payload.

    Raises:
        PayloadError: when it is no batch at all.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise PayloadError(f"event payload of {len(payload)} bytes exceeds {MAX_PAYLOAD_BYTES}")
    try:
        raw = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PayloadError(f"event payload is not msgpack: {error}") from error
    events, rank, epoch = _open_batch(raw)
    decoded: list[Event] = []
    num_bad = 0
    for entry in events:
        try:
            fields = _open_event(entry)
            event = _parse_event(fields)
        except (TypeError, ValueError, OverflowError):
            num_bad += 1
            continue
        epoch = _read_epoch(fields.get("epoch")) or epoch
        if event is not None:
            decoded.append(event)
    return EventBatch(events=tuple(decoded), num_bad=num_bad, epoch=epoch, rank=rank)


def _open_batch(raw: Any) -> tuple[Sequence[Any], int, str | None]:
    if isinstance(raw, dict):
        events, rank = raw.get("events"), raw.get("data_parallel_rank", raw.get("attn_dp_rank"))
        epoch = _read_epoch(raw.get("epoch"))
    elif isinstance(raw, list) and len(raw) >= 2:
        events, rank, epoch = raw[1], raw[2] if len(raw) > 2 else None, None
    else:
        raise PayloadError("event payload is neither an array [ts, events, rank] nor a map")
    if not isinstance(events, list):
        raise PayloadError("event payload has no list of events")
    return events, rank if isinstance(rank, int) else 0, epoch


def _open_event(entry: Any) -> Mapping[str, Any]:
    if isinstance(entry, dict):
        return entry
    if not isinstance(entry, list) or not entry or not isinstance(entry[0], str):
        raise ValueError("an event is an array with its tag first, or a map")
    names = _FIELDS.get(entry[0], ("type",))
    return dict(zip(names, entry, strict=False))


def _parse_event(fields: Mapping[str, Any]) -> Event | None:
    tag = fields.get("type")
    if tag == "BlockStored":
        return _parse_stored(fields)
    if tag == "BlockRemoved":
        return Removed(
            hashes=_read_hashes(fields["block_hashes"]) if "block_hashes" in fields else _missing(),
            tier=_read_tier(fields.get("medium")),
            group=_read_int(fields.get("group_idx")) or 0,
        )
    if tag == "AllBlocksCleared":
        return Cleared()
    if tag == "Heartbeat":
        return Heartbeat(sequence=_read_int(fields.get("sequence")))
    return None


def _parse_stored(fields: Mapping[str, Any]) -> Stored:
    hashes = _read_hashes(fields.get("block_hashes"))
    tokens = fields.get("token_ids")
    block_tokens = _read_int(fields.get("block_size"))
    if not isinstance(tokens, list) or block_tokens is None or block_tokens < 1:
        raise ValueError("a stored event needs token_ids and block_size")
    scheme = _read_int(fields.get("hash_scheme"))
    if len(tokens) != len(hashes) * block_tokens and not (scheme is not None and not tokens):
        raise ValueError("tokens do not cover the blocks exactly: masked blocks cannot be indexed")
    adapter = fields.get("lora_name") or ""
    salt, extras = _read_extras(fields.get("extra_keys"), len(hashes), adapter)
    namespace = fields.get("cache_salt") or fields.get("tenant") or salt
    parent = fields.get("parent_block_hash")
    window = _read_int(fields.get("kv_cache_spec_sliding_window"))
    return Stored(
        hashes=hashes,
        parent=None if parent is None or parent == 0 else _read_hash(parent),
        tokens=tuple(_read_token(token) for token in tokens),
        block_tokens=block_tokens,
        tier=_read_tier(fields.get("medium")),
        adapter=str(adapter),
        namespace=str(namespace),
        extras=extras,
        group=_read_int(fields.get("group_idx")) or 0,
        window_tokens=window,
        reuse=fields.get("reuse") is True,
        scheme=scheme,
    )


def _read_extras(raw: Any, num_blocks: int, adapter: str) -> tuple[str, tuple[bytes, ...]]:
    """Salt of the first block, and per block what remains once adapter and salt are taken out."""
    if raw is None:
        return "", (b"",) * num_blocks
    if not isinstance(raw, list) or len(raw) != num_blocks:
        raise ValueError("extra_keys has one entry per block")
    salt = ""
    extras: list[bytes] = []
    for position, entry in enumerate(raw):
        keys = list(entry or ())
        if keys and adapter and keys[0] == adapter:
            keys = keys[1:]
        if position == 0:
            names = [key for key in keys if isinstance(key, str)]
            salt = names[0] if names else ""
            keys = [key for key in keys if key is not salt]
        extras.append(msgspec.msgpack.encode(keys) if keys else b"")
    return salt, tuple(extras)


def _read_hashes(raw: Any) -> tuple[int, ...]:
    if not isinstance(raw, list):
        raise TypeError("block_hashes is a list")
    return tuple(_read_hash(entry) for entry in raw)


def _read_hash(raw: Any) -> int:
    """A 64-bit number from an integer, signed or not, or from the last eight bytes of a digest."""
    if isinstance(raw, bytes):
        return int.from_bytes(raw[-8:], "big")
    if isinstance(raw, bool) or not isinstance(raw, int):
        raise TypeError("a block hash is an integer or bytes")
    return raw & _U64


def _read_token(raw: Any) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int) or not 0 <= raw < 1 << 32:
        raise ValueError("a token id is an unsigned 32-bit integer")  # some publish pairs: not indexable
    return raw


def _read_tier(raw: Any) -> Tier:
    return _TIERS.get(raw, Tier.UNKNOWN) if raw is None or isinstance(raw, str) else Tier.UNKNOWN


def _read_int(raw: Any) -> int | None:
    return raw if isinstance(raw, int) and not isinstance(raw, bool) else None


def _read_epoch(raw: Any) -> str | None:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return f"{raw & _U64:016x}"
    return raw if isinstance(raw, str) and raw else None


def _missing() -> tuple[int, ...]:
    raise ValueError("a removed event needs block_hashes")
