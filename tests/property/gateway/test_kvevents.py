"""The event decoder and the stream survive anything."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond_gateway.routing.held import ReplicaBlocks
from millpond_gateway.routing.kvevents import PayloadError, decode_batch, parse_replay_frames
from millpond_gateway.routing.stream import EventStream

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4), max_leaves=8)
names = st.sampled_from(
    ["type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "medium", "lora_name", "extra_keys",
     "group_idx", "cache_salt", "tenant", "epoch", "sequence", "hash_scheme", "kv_cache_spec_sliding_window"]
)  # fmt: skip
tags = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Heartbeat", "Other"])
events: st.SearchStrategy[Any] = st.one_of(
    values,
    st.builds(lambda tag, rest: [tag, *rest], tags, st.lists(values, max_size=10)),
    st.builds(lambda tag, rest: {**rest, "type": tag}, tags, st.dictionaries(names, values, max_size=10)),
)
payloads = st.one_of(
    st.binary(max_size=60),
    st.builds(lambda entries: msgspec.msgpack.encode([1.0, entries, 0]), st.lists(events, max_size=4)),
)


@settings(max_examples=150, deadline=None)
@given(payloads)
def test_a_payload_decodes_or_is_refused_by_type(payload: bytes) -> None:
    try:
        batch = decode_batch(payload)
    except PayloadError:
        return
    ReplicaBlocks(model="m", seed=0).apply(batch.events)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), payloads), max_size=12))
def test_a_stream_takes_any_sequence_and_keeps_its_confidence_in_bounds(
    messages: list[tuple[int, bytes]],
) -> None:
    stream = EventStream(ReplicaBlocks(model="m", seed=0))
    for now, (sequence, payload) in enumerate(messages):
        for _ in stream.live(sequence, payload, float(now)):
            stream.replay_ended()
        assert 0.0 <= stream.confidence(float(now)) <= 1.0


@given(st.lists(st.binary(max_size=9), max_size=5))
def test_replay_frames_parse_or_are_refused_by_type(frames: list[bytes]) -> None:
    try:
        parse_replay_frames(frames)
    except PayloadError:
        return
