"""KV events over real sockets: order, keys, replay, snapshot, heartbeat, overflow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from millpond_common.contract import kv_events as wire
from millpond_common.contract.blockkey import KeyScope, compute_block_keys
from millpond_engine.loop.kv_publisher import KvPublisher, PublisherSettings
from millpond_engine.loop.kv_resident import ResidentBlocks
from millpond_engine.records.outputs import BlocksRemoved, BlocksStored, CacheCleared

SCOPE = KeyScope("m", 4, 9, "", "acme")
NAMESPACE = ("m", "", "acme", "")


def stored(
    first_block: int, tokens: list[int], *, parent: int | None = None, prefix: list[int] | None = None
) -> Any:
    blocks = tuple(range(first_block, first_block + len(tokens) // 4))
    return BlocksStored(blocks, parent, tuple(tokens), NAMESPACE, tuple(prefix or ()))


class Client:
    """A consumer as the reference describes it: SUB for live events, DEALER for replay and snapshot."""

    def __init__(self, publisher: KvPublisher) -> None:
        self._context = zmq.Context()
        self.live = self._context.socket(zmq.SUB)
        self.live.setsockopt(zmq.SUBSCRIBE, b"")
        self.live.setsockopt(zmq.RCVTIMEO, 5000)
        self.live.connect(publisher.endpoint)
        self.ask = self._context.socket(zmq.DEALER)
        self.ask.setsockopt(zmq.RCVTIMEO, 5000)
        self.ask.connect(publisher.replay_endpoint)

    def receive(self) -> tuple[int, list[Any]]:
        topic, sequence, payload = self.live.recv_multipart()
        assert topic == wire.TOPIC
        return int.from_bytes(sequence, "big"), msgspec.msgpack.decode(payload)

    def fetch(self, asked: bytes) -> tuple[list[tuple[int, Any]], bytes]:
        """Answers until the end marker, and its payload."""
        self.ask.send_multipart([b"", asked])
        answers = []
        while True:
            empty, topic, sequence, payload = self.ask.recv_multipart()
            assert (empty, topic) == (b"", wire.TOPIC)
            number = int.from_bytes(sequence, "big")
            if number == wire.END_SEQUENCE:
                return answers, payload
            answers.append((number, msgspec.msgpack.decode(payload)))

    def close(self) -> None:
        self._context.destroy(linger=0)


def make_publisher(**options: Any) -> KvPublisher:
    settings = PublisherSettings(
        "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", **{"heartbeat_seconds": 3600, **options}
    )
    return KvPublisher(settings, ResidentBlocks(model="m", block_tokens=4, seed=9), epoch="00ff")


@pytest.fixture
def pair() -> Iterator[tuple[KvPublisher, Client]]:
    publisher = make_publisher()
    publisher._sent_at = time.monotonic()
    client = Client(publisher)
    time.sleep(0.2)  # a subscription takes effect when the publisher has read it
    publisher.start()
    yield publisher, client
    client.close()
    publisher.stop()


def test_events_carry_routing_keys_epoch_and_totals(pair: tuple[KvPublisher, Client]) -> None:
    publisher, client = pair
    tokens = list(range(12))
    publisher.publish((stored(0, tokens),))
    sequence, (seconds, events, rank) = client.receive()
    assert (sequence, rank) == (0, 0)
    assert abs(seconds - time.time()) < 60
    assert events == [
        {
            "type": "BlockStored",
            "block_hashes": compute_block_keys(SCOPE, tokens),
            "parent_block_hash": None,
            "token_ids": [],
            "block_size": 4,
            "medium": "GPU",
            "hash_scheme": 1,
            "epoch": "00ff",
            "stored_total": 3,
            "removed_total": 0,
        }
    ]


def test_children_name_their_parent_also_when_it_is_not_resident(pair: tuple[KvPublisher, Client]) -> None:
    publisher, client = pair
    tokens = list(range(16))
    keys = compute_block_keys(SCOPE, tokens)
    publisher.publish((stored(0, tokens[:8]),))
    publisher.publish((stored(5, tokens[8:12], parent=1, prefix=tokens[:8]),))
    publisher.publish((BlocksRemoved((5, 0), "Capacity"),))
    publisher.publish((stored(7, tokens[12:], parent=99, prefix=tokens[:12]),))
    events = [client.receive()[1][1][0] for _ in range(4)]
    assert (events[1]["parent_block_hash"], events[1]["block_hashes"]) == (keys[1], [keys[2]])
    assert events[2]["block_hashes"] == [keys[2], keys[0]]
    assert (events[3]["parent_block_hash"], events[3]["block_hashes"]) == (keys[2], [keys[3]])
    assert (events[3]["stored_total"], events[3]["removed_total"]) == (4, 2)


def test_a_block_held_twice_is_removed_once(pair: tuple[KvPublisher, Client]) -> None:
    publisher, client = pair
    tokens = [1, 2, 3, 4]
    publisher.publish((stored(0, tokens), stored(1, tokens)))
    publisher.publish((BlocksRemoved((0,), "Capacity"),))
    publisher.publish((BlocksRemoved((1,), "Capacity"), BlocksRemoved((77,), "Capacity")))
    assert len(client.receive()[1][1]) == 2
    _, (_, events, _) = client.receive()
    assert [event["block_hashes"] for event in events] == [compute_block_keys(SCOPE, tokens)]


def test_replay_gives_retained_batches_from_a_sequence_on(pair: tuple[KvPublisher, Client]) -> None:
    publisher, client = pair
    for number in range(5):
        publisher.publish((stored(number, [number] * 4),))
    for _ in range(5):
        client.receive()
    answers, end = client.fetch(wire.encode_sequence(2))
    assert [sequence for sequence, _ in answers] == [2, 3, 4]
    assert answers[0][1][1][0]["block_hashes"] == compute_block_keys(SCOPE, [2] * 4)
    assert end == b""


def test_a_snapshot_lists_residents_and_where_to_go_on(pair: tuple[KvPublisher, Client]) -> None:
    publisher, client = pair
    tokens = list(range(1200))
    publisher.publish((stored(0, tokens),))
    publisher.publish((BlocksRemoved((299, 298), "Capacity"),))
    client.receive()
    client.receive()
    answers, end = client.fetch(wire.SNAPSHOT_REQUEST)
    finish = wire.decode_snapshot_end(end)
    assert (finish.epoch, finish.resume_sequence) == ("00ff", 2)
    events = [event for _, (_, events, _) in answers for event in events]
    keys = [key for event in events for key in event["block_hashes"]]
    assert keys == compute_block_keys(SCOPE, tokens[:1192])
    assert not any(event["token_ids"] for event in events)
    seen: set[int | None] = {None}
    for event in events:
        assert event["parent_block_hash"] in seen
        seen.update(event["block_hashes"])
    publisher.publish((CacheCleared(),))
    assert client.receive()[0] == 2
    assert client.fetch(wire.SNAPSHOT_REQUEST)[0] == []


def test_nothing_that_leaves_holds_a_prompt_or_a_salt(pair: tuple[KvPublisher, Client]) -> None:
    publisher, client = pair
    tokens = [70_001 + number for number in range(8)]
    publisher.publish((BlocksStored((0, 1), None, tuple(tokens), ("m", "", "acme", "pepper"), ()),))
    _, _, live = client.live.recv_multipart()
    replayed, _ = client.fetch(wire.encode_sequence(0))
    told, _ = client.fetch(wire.SNAPSHOT_REQUEST)
    for seen in (live, msgspec.msgpack.encode(replayed), msgspec.msgpack.encode(told)):
        assert b"pepper" not in seen
        assert not any(msgspec.msgpack.encode(token) in seen for token in tokens)
        assert b"BlockStored" in seen


def test_malformed_requests_are_dropped_and_the_next_is_answered(pair: tuple[KvPublisher, Client]) -> None:
    _, client = pair
    for frames in ([b""], [b"", b"x", b"y"], [b"hello"], [b"", b"short"]):
        client.ask.send_multipart(frames)
    assert client.fetch(wire.encode_sequence(0)) == ([], b"")


def test_heartbeats_use_sequences_so_that_a_lost_message_shows() -> None:
    publisher = make_publisher(heartbeat_seconds=0.05)
    client = Client(publisher)
    publisher.start()
    try:
        first, (_, events, _) = client.receive()
        assert events[0]["type"] == "Heartbeat"
        second, (_, events, _) = client.receive()
        assert (second, events[0]["sequence"]) == (first + 1, first)
    finally:
        client.close()
        publisher.stop()


def test_an_overflow_never_waits_shows_a_gap_and_clears() -> None:
    publisher = make_publisher(max_queued_batches=3)
    publisher._sent_at = time.monotonic()
    client = Client(publisher)
    time.sleep(0.2)
    started = time.monotonic()
    for number in range(7):  # the thread does not run yet: 4 overflow, 3 stay
        publisher.publish((stored(number, [number] * 4),))
    assert time.monotonic() - started < 0.5
    publisher.start()
    try:
        sequence, (_, events, _) = client.receive()
        assert (sequence, events[0]["type"]) == (4, "AllBlocksCleared")
        assert [client.receive()[0] for _ in range(3)] == [5, 6, 7]
        assert publisher.num_dropped == 4
    finally:
        client.close()
        publisher.stop()


def test_a_taken_port_is_a_plain_error() -> None:
    publisher = make_publisher()
    try:
        settings = PublisherSettings(publisher.endpoint, "tcp://127.0.0.1:*")
        with pytest.raises(OSError, match="cannot be bound"):
            KvPublisher(settings, ResidentBlocks(model="m", block_tokens=4, seed=9), epoch="1")
    finally:
        publisher.stop()


def test_salts_and_adapters_separate_keys() -> None:
    resident = ResidentBlocks(model="m", block_tokens=4, seed=9)
    keys = set()
    for number, namespace in enumerate(
        [("m", "", "a", ""), ("m", "", "b", ""), ("m", "", "a", "s"), ("m", "x", "a", "")]
    ):
        event = BlocksStored((number,), None, (1, 2, 3, 4), namespace, ())
        (made,) = resident.apply(event)
        assert isinstance(made, wire.StoredBlocks)
        keys.add(made.keys)
    assert len(keys) == 4
    assert len(resident) == 4


def test_the_array_form_has_vllm_positions() -> None:
    event = wire.StoredBlocks(
        keys=(1, 2), parent=None, tokens=[0] * 8, block_tokens=4, adapter="sql", namespace="t"
    )
    stamp = wire.EventStamp("e", 2, 0)
    _, events, _ = msgspec.msgpack.decode(wire.encode_batch([event], stamp, seconds=1.0, form="array"))
    assert events == [["BlockStored", [1, 2], None, [0] * 8, 4, None, "GPU", "sql", [["sql", "t"], ["sql"]]]]


def test_after_an_answer_the_publisher_rests_three_times_as_long(
    pair: tuple[KvPublisher, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, client = pair
    begun: list[float] = []

    def answer_slowly(asked_by: bytes, start: int) -> None:
        begun.append(time.monotonic())
        time.sleep(0.05)
        publisher._reply(asked_by, wire.END_SEQUENCE, b"")

    monkeypatch.setattr(publisher, "_answer_replay", answer_slowly)
    for _ in range(3):
        client.ask.send_multipart([b"", wire.encode_sequence(0)])
    publisher.publish((stored(0, [1, 2, 3, 4]),))
    assert client.receive()[1], "live events go out all the while"
    for _ in range(3):
        client.ask.recv_multipart()
    assert begun[1] - begun[0] >= 0.2
    assert begun[2] - begun[1] >= 0.2
