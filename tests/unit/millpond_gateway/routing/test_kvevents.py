from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.support.routing import BLOCK, make_tokens, pack_event_batch, token_keys

from millpond_common.contract import kv_events as wire
from millpond_gateway.routing.held import ReplicaBlocks
from millpond_gateway.routing.kvevents import (
    Cleared,
    PayloadError,
    Removed,
    Stored,
    Tier,
    decode_batch,
    parse_live_frames,
    parse_replay_frames,
)


def stored_map(tokens: list[int], hashes: list[int], **fields: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": BLOCK,
        "medium": "GPU",
        **fields,
    }


def stored_array(tokens: list[int], hashes: list[int], *rest: Any) -> list[Any]:
    return ["BlockStored", hashes, None, tokens, BLOCK, *rest]


def apply_to_blocks(*events: Any) -> ReplicaBlocks:
    blocks = ReplicaBlocks(model="m", seed=0)
    blocks.apply(decode_batch(pack_event_batch(list(events))).events)
    return blocks


def test_gw_073_maps_and_arrays_give_the_same_index() -> None:
    tokens = make_tokens(1, 4 * BLOCK)
    by_map = apply_to_blocks(stored_map(tokens, [1, 2, 3, 4]))
    by_array = apply_to_blocks(stored_array(tokens, [1, 2, 3, 4]))
    mixed = apply_to_blocks(
        stored_array(tokens[: 2 * BLOCK], [1, 2]),
        stored_map(tokens[2 * BLOCK :], [3, 4], parent_block_hash=2),
    )
    keys = token_keys(tokens)
    assert [b.match(keys).num_blocks for b in (by_map, by_array, mixed)] == [4, 4, 4]


def test_a_batch_may_be_a_map_with_the_same_names() -> None:
    event = stored_map(make_tokens(1, BLOCK), [1])
    payload = msgspec.msgpack.encode({"ts": 1.0, "events": [event], "data_parallel_rank": 3})
    batch = decode_batch(payload)
    assert (len(batch.events), batch.rank) == (1, 3)


def test_gw_074_extra_trailing_fields_leave_known_positions() -> None:
    tokens = make_tokens(1, BLOCK)
    event = [
        *stored_array(tokens, [7], None, "GPU", None, None, 0, "full_attention", None),
        "new",
        {"more": 1},
    ]
    batch = decode_batch(pack_event_batch([event, ["BlockRemoved", [7], "GPU", 0, "LOCAL", 1, 2]]))
    assert batch.num_bad == 0
    stored, removed = batch.events
    assert isinstance(stored, Stored)
    assert isinstance(removed, Removed)
    assert (stored.hashes, stored.tier, stored.group) == ((7,), Tier.DEVICE, 0)
    assert removed.hashes == (7,)


def test_first_releases_without_medium_mean_the_device() -> None:
    removed = decode_batch(pack_event_batch([["BlockRemoved", [1]]])).events[0]
    assert isinstance(removed, Removed)
    assert removed.tier is Tier.DEVICE


def test_gw_080_an_unknown_medium_earns_no_credit() -> None:
    tokens = make_tokens(1, 2 * BLOCK)
    blocks = apply_to_blocks(stored_map(tokens, [1, 2], medium="SSD_X"))
    assert blocks.match(token_keys(tokens)).credit_blocks == 0
    slower = apply_to_blocks(stored_map(tokens, [1, 2], medium="CPU_PINNED"))
    match = slower.match(token_keys(tokens))
    assert match.num_blocks == 0
    assert 0 < match.credit_blocks < 2


def test_gw_070_the_adapters_name_in_extra_keys_is_no_image() -> None:
    tokens = make_tokens(1, 2 * BLOCK)
    event = stored_map(tokens, [1, 2], lora_name="adapter-116", extra_keys=[["adapter-116"], ["adapter-116"]])
    blocks = apply_to_blocks(event)
    assert blocks.match(token_keys(tokens, adapter="adapter-116")).num_blocks == 2
    assert blocks.match(token_keys(tokens)).num_blocks == 0


@pytest.mark.parametrize("field", ["cache_salt", "tenant", "extra_keys"])
def test_gw_086_a_salt_is_read_wherever_it_stands(field: str) -> None:
    tokens = make_tokens(1, 2 * BLOCK)
    value: Any = [["salt-a"], None] if field == "extra_keys" else "salt-a"
    blocks = apply_to_blocks(stored_map(tokens, [1, 2], **{field: value}))
    assert blocks.match(token_keys(tokens, namespace="salt-a")).num_blocks == 2
    assert blocks.match(token_keys(tokens, namespace="salt-b")).num_blocks == 0
    assert blocks.match(token_keys(tokens)).num_blocks == 0


def test_gw_087_an_images_block_matches_no_text() -> None:
    tokens = make_tokens(1, 3 * BLOCK)
    blocks = apply_to_blocks(stored_map(tokens, [1, 2, 3], extra_keys=[None, [["image", 4]], None]))
    assert blocks.match(token_keys(tokens)).num_blocks == 1


@pytest.mark.parametrize(
    "sent", [(1 << 63) + 5, (1 << 63) + 5 - (1 << 64), b"\x01" * 24 + ((1 << 63) + 5).to_bytes(8, "big")]
)
def test_hashes_come_unsigned_signed_or_as_digests(sent: object) -> None:
    removed = decode_batch(pack_event_batch([{"type": "BlockRemoved", "block_hashes": [sent]}])).events[0]
    assert isinstance(removed, Removed)
    assert removed.hashes == ((1 << 63) + 5,)


@pytest.mark.parametrize(
    "bad",
    [
        stored_map(make_tokens(1, BLOCK - 1), [1]),  # masked block: tokens cover the range, hashes do not
        stored_map([[1, 2]] * BLOCK, [1]),  # speculative decoding publishes pairs
        stored_map(make_tokens(1, BLOCK), [True]),
        stored_map(make_tokens(1, BLOCK), [1], block_size=0),
        stored_map(make_tokens(1, BLOCK), [1], extra_keys=[None, None]),
        {"type": "BlockRemoved"},
        [],
        17,
    ],
)
def test_one_bad_event_is_counted_and_the_rest_kept(bad: Any) -> None:
    batch = decode_batch(pack_event_batch([bad, ["AllBlocksCleared"], {"type": "FutureEvent", "x": 1}]))
    assert batch.num_bad == 1
    assert batch.events == (Cleared(),)


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", msgspec.msgpack.encode("text"), msgspec.msgpack.encode([1.0, 2])]
)
def test_a_payload_that_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(PayloadError):
        decode_batch(payload)


def test_gw_081_both_replay_frames_are_read() -> None:
    sequence = wire.encode_sequence(41)
    assert parse_replay_frames([sequence, b"x"]) == (41, b"x")
    assert parse_replay_frames([b"kv@a@m", sequence, b"x"]) == (41, b"x")
    assert parse_replay_frames([b"", sequence, b"x"]) == (41, b"x")
    assert parse_replay_frames([b"", b"topic", sequence, b"x"]) == (41, b"x")
    assert parse_replay_frames([b"", b"", sequence, b"x"]) == (41, b"x")
    assert parse_replay_frames([b"", wire.encode_sequence(wire.END_SEQUENCE), b""]) is None
    with pytest.raises(PayloadError):
        parse_replay_frames([b"only"])


def test_live_frames_carry_topic_sequence_and_payload() -> None:
    assert parse_live_frames([b"", wire.encode_sequence(7), b"p"]) == (7, b"p")
    with pytest.raises(PayloadError):
        parse_live_frames([b"topic", b"short", b"p"])


@pytest.mark.parametrize("form", ["map", "array"])
def test_our_engines_events_are_read_in_both_forms(form: wire.Form) -> None:
    tokens = make_tokens(1, 3 * BLOCK)
    scope = {"adapter": "sql", "namespace": "acme"}
    keys = token_keys(tokens, **scope)
    event = wire.StoredBlocks(keys=tuple(keys), parent=None, tokens=tokens, block_tokens=BLOCK, **scope)
    stamp = wire.EventStamp("00ff", 3, 0)
    batch = decode_batch(wire.encode_batch([event, wire.Heartbeat(4)], stamp, seconds=1.0, form=form))
    blocks = ReplicaBlocks(model="m", seed=0)
    blocks.apply(batch.events)
    assert batch.num_bad == 0
    assert batch.epoch == ("00ff" if form == "map" else None)
    assert blocks.match(keys).num_blocks == 3
    blocks.apply(
        decode_batch(
            wire.encode_batch([wire.RemovedBlocks((keys[2],))], stamp, seconds=2.0, form=form)
        ).events
    )
    assert blocks.match(keys).num_blocks == 2
