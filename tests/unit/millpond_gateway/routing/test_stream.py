from __future__ import annotations

from typing import Any

import pytest
from tests.support.routing import BLOCK, make_endpoint, make_tokens, pack_event_batch, token_keys

from millpond_common.contract import kv_events as wire
from millpond_gateway.routing.held import ReplicaBlocks
from millpond_gateway.routing.index import PrefixIndex
from millpond_gateway.routing.kvevents import parse_live_frames
from millpond_gateway.routing.records import KeyKind, PromptKeys
from millpond_gateway.routing.settings import RoutingSettings
from millpond_gateway.routing.stream import Ask, AskKind, EventStream

TOKENS = make_tokens(1, 64 * BLOCK)
KEYS = token_keys(TOKENS)


def payload(number: int, **fields: Any) -> bytes:
    """The batch with sequence `number` stores block `number` of TOKENS."""
    event = {
        "type": "BlockStored",
        "block_hashes": [100 + number],
        "parent_block_hash": 99 + number if number else None,
        "token_ids": TOKENS[number * BLOCK : (number + 1) * BLOCK],
        "block_size": BLOCK,
        "medium": "GPU",
        **fields,
    }
    return pack_event_batch([event])


def make_stream(upto: int = 0, **fields: Any) -> EventStream:
    stream = EventStream(ReplicaBlocks(model="m", seed=0))
    for number in range(upto):
        assert stream.live(number, payload(number, **fields), 1.0) == []
    return stream


def held(stream: EventStream) -> int:
    return stream.blocks.match(KEYS).num_blocks


def test_a_stream_heard_from_its_start_is_trusted() -> None:
    stream = make_stream(5)
    assert (held(stream), stream.synced, stream.confidence(1.0)) == (5, True, 1.0)


def test_gw_069_a_restart_at_the_same_address_leaves_no_stale_hit() -> None:
    stream = make_stream(10)
    assert stream.live(0, payload(0), 2.0) == []
    assert held(stream) == 1
    assert stream.counts.num_restarts == 1
    assert stream.confidence(2.0) == 1.0  # this life is known from its start


def test_a_restart_seen_late_purges_first_and_asks_for_the_rest() -> None:
    stream = make_stream(10)
    assert stream.live(3, payload(3), 2.0) == [Ask(AskKind.REPLAY, 0)]
    assert (held(stream), stream.confidence(2.0)) == (0, 0.0)


def test_a_new_epoch_purges_even_where_the_sequence_goes_on() -> None:
    stream = make_stream(4, epoch="aa")
    assert stream.live(4, payload(4, epoch="bb"), 2.0) == [Ask(AskKind.REPLAY, 0)]
    assert held(stream) == 0


def test_a_duplicate_of_the_same_epoch_changes_nothing() -> None:
    stream = make_stream(4, epoch="aa")
    assert stream.live(2, payload(2, epoch="aa"), 2.0) == []
    assert (held(stream), stream.counts.num_restarts) == (4, 0)


def test_an_epoch_told_by_a_response_header_purges_too() -> None:
    stream = make_stream(4, epoch="aa")
    stream.restart("aa")
    assert held(stream) == 4
    stream.restart("bb")
    assert held(stream) == 0


def test_gw_082_a_gap_is_filled_before_what_showed_it_and_nothing_twice() -> None:
    stream = make_stream(2)
    assert stream.live(20, payload(20), 2.0) == [Ask(AskKind.REPLAY, 2)]
    assert stream.confidence(2.0) < 1.0
    assert stream.live(21, payload(21), 2.0) == []
    assert held(stream) == 2  # nothing of the far side yet
    for number in range(22):  # the publisher may answer with more than was asked for
        assert stream.replayed(number, payload(number), 2.0) == []
    assert stream.replay_ended() == []
    assert held(stream) == 22
    assert stream.counts.num_batches == 22
    assert stream.confidence(2.0) == 1.0


def test_a_replay_without_the_old_history_leads_to_a_snapshot() -> None:
    stream = make_stream(2)
    stream.live(20, payload(20), 2.0)
    stream.replayed(15, payload(15), 2.0)
    for number in range(16, 21):
        stream.replayed(number, payload(number), 2.0)
    assert stream.replay_ended() == [Ask(AskKind.SNAPSHOT)]
    assert not stream.synced
    parts = [payload(number) for number in range(21)]
    assert stream.snapshot(parts, resume_sequence=21, epoch="aa", now=3.0) == []
    assert (held(stream), stream.synced, stream.confidence(3.0)) == (21, True, 1.0)
    stream.live(21, payload(21), 3.0)
    assert held(stream) == 22


def test_live_batches_during_a_snapshot_follow_it() -> None:
    stream = make_stream()
    stream.live(5, payload(5), 1.0)
    stream.live(6, payload(6), 1.0)
    parts = [payload(number) for number in range(6)]
    assert stream.snapshot(parts, resume_sequence=6, epoch="aa", now=1.0) == []
    assert (held(stream), stream.synced) == (7, True)


def test_a_snapshot_older_than_the_stream_asks_for_the_part_between() -> None:
    stream = make_stream()
    stream.live(8, payload(8), 1.0)
    parts = [payload(number) for number in range(6)]
    assert stream.snapshot(parts, resume_sequence=6, epoch="aa", now=1.0) == [Ask(AskKind.REPLAY, 6)]
    for number in (6, 7, 8):
        stream.replayed(number, payload(number), 1.0)
    assert stream.replay_ended() == []
    assert (held(stream), stream.synced) == (9, True)


def test_a_heartbeat_shows_a_gap_although_nothing_follows() -> None:
    stream = make_stream(3)
    beat = pack_event_batch([{"type": "Heartbeat", "sequence": 7}])
    assert stream.live(3, beat, 2.0) == [Ask(AskKind.REPLAY, 4)]


def test_a_broken_payload_lowers_confidence_and_the_stream_goes_on() -> None:
    stream = make_stream(3)
    assert stream.live(3, b"\xc1", 2.0) == []
    assert stream.confidence(2.0) < 1.0
    assert stream.counts.num_bad_events == 1
    stream.live(4, payload(3), 2.0)
    assert held(stream) == 4


def test_silence_while_requests_flow_halves_confidence() -> None:
    stream = make_stream(3)
    assert stream.confidence(100.0) == 1.0  # nobody sent anything: nothing is due
    stream.note_routed(90.0)
    assert stream.confidence(100.0) == 0.5
    stream.live(3, payload(3), 100.0)
    assert stream.confidence(100.0) == 1.0


def test_disagreement_with_cached_tokens_lowers_and_agreement_restores() -> None:
    stream = make_stream(3)
    for _ in range(5):
        stream.audit(predicted=1000, real=100)
    low = stream.confidence(1.0)
    assert low < 0.5
    for _ in range(80):
        stream.audit(predicted=1000, real=1000)
    assert stream.confidence(1.0) > 0.95


def test_overflow_drops_what_cannot_be_true_and_asks_for_a_snapshot() -> None:
    stream = EventStream(ReplicaBlocks(model="m", seed=0, num_blocks=1))
    asks: list[Ask] = []
    for number in range(120):
        tokens = make_tokens(900 + number, BLOCK)
        event = payload(0, token_ids=tokens, block_hashes=[5000 + number])
        asks += stream.live(number, event, 1.0)
    assert Ask(AskKind.SNAPSHOT) in asks


@pytest.mark.parametrize("lost", [{3}, {1, 2, 5}, set(range(0, 30, 10))])
def test_a_tenth_of_events_lost_is_detected_and_healed(lost: set[int]) -> None:
    stream = make_stream()
    for number in range(30):
        if number in lost:
            continue
        for ask in stream.live(number, payload(number), 1.0):
            assert ask.kind is AskKind.REPLAY
            for missed in range(ask.from_sequence, number + 1):
                stream.replayed(missed, payload(missed), 1.0)
            assert stream.replay_ended() == []
    assert (held(stream), stream.synced) == (30, True)


def test_gw_072_a_topic_names_nobody() -> None:
    """`kv@10.0.0.1@m` has no port and the endpoint has one: the connection says whose stream it is."""
    index = PrefixIndex(RoutingSettings(model="m"))
    endpoint = make_endpoint("pod-uid", address="10.0.0.1:8000")
    stream = index.open_stream(endpoint)
    frames = [b"kv@10.0.0.1@m", wire.encode_sequence(0), payload(0)]
    stream.live(*parse_live_frames(frames), 1.0)
    prompt = PromptKeys(keys=KEYS, tokens_per_key=float(BLOCK), num_tokens=len(TOKENS), kind=KeyKind.TOKENS)
    assert list(index.predict(prompt, 10.0).replicas) == ["pod-uid"]
