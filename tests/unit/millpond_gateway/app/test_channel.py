"""Keyed channels between gateways, and the file that the keys come from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from millpond_gateway.app import peer_keys
from millpond_gateway.app.channel import (
    Channel,
    PeerIdentity,
    PeerKey,
    PeerRefusedError,
    Refusal,
    make_key,
)
from millpond_gateway.app.peer_keys import PeerKeyError, PeerKeys, make_worker_key, read_keys

A, B = PeerIdentity("a/1", 1), PeerIdentity("b/2", 2)
KEY, OTHER = make_key(b"k" * 32), make_key(b"o" * 32)


def join(dialer: Channel, acceptor: Channel, *, seen: list[bytes] | None = None) -> tuple[Channel, Channel]:
    """Let both greet; `seen` gets what the dialer sent."""
    said = [] if seen is None else seen
    to_acceptor = [dialer.greet()]
    while to_acceptor:
        said += to_acceptor
        answers = [answer for frame in to_acceptor for answer in acceptor.receive(frame)[1]]
        to_acceptor = [frame for answer in answers for frame in dialer.receive(answer)[1]]
    return dialer, acceptor


def make_pair(*, seen: list[bytes] | None = None) -> tuple[Channel, Channel]:
    return join(Channel(A, [KEY]), Channel(B, [KEY]), seen=seen)


def find_reason(channel: Channel, frame: bytes) -> str:
    with pytest.raises(PeerRefusedError) as caught:
        channel.receive(frame)
    return caught.value.reason


def test_both_ends_know_each_other_before_the_first_message() -> None:
    dialer, acceptor = make_pair()
    assert (dialer.proved, dialer.peer) == (True, B)
    assert (acceptor.proved, acceptor.peer) == (True, A)


@given(st.lists(st.tuples(st.booleans(), st.binary(min_size=1, max_size=64)), max_size=20))
def test_messages_pass_both_ways_in_order(messages: list[tuple[bool, bytes]]) -> None:
    dialer, acceptor = make_pair()
    for from_dialer, message in messages:
        sender, receiver = (dialer, acceptor) if from_dialer else (acceptor, dialer)
        assert receiver.receive(sender.seal(message)) == (message, ())


def test_a_message_passes_once_and_in_its_place_only() -> None:
    dialer, acceptor = make_pair()
    first, second = dialer.seal(b"first"), dialer.seal(b"second")
    assert find_reason(acceptor, second) == Refusal.BAD_SEAL, "one was left out"
    dialer, acceptor = make_pair()
    first = dialer.seal(b"first")
    acceptor.receive(first)
    assert find_reason(acceptor, first) == Refusal.BAD_SEAL, "repeated"
    dialer, acceptor = make_pair()
    assert find_reason(dialer, dialer.seal(b"first")) == Refusal.BAD_SEAL, "sent back to its sender"


@given(st.integers(min_value=0), st.integers(min_value=1, max_value=255))
def test_any_changed_byte_is_found(position: int, change: int) -> None:
    dialer, acceptor = make_pair()
    frame = bytearray(dialer.seal(b"reserve"))
    frame[position % len(frame)] ^= change
    assert find_reason(acceptor, bytes(frame)) == Refusal.BAD_SEAL


def test_a_recorded_connection_proves_nothing_on_another() -> None:
    recorded: list[bytes] = []
    dialer, _ = make_pair(seen=recorded)
    recorded.append(dialer.seal(b"reserve"))
    later = Channel(B, [KEY])
    hello, proof, _message = recorded
    later.receive(hello)
    assert find_reason(later, proof) == Refusal.BAD_SEAL
    assert not later.proved


def test_a_name_cannot_be_changed_on_the_way() -> None:
    dialer, acceptor = Channel(A, [KEY]), Channel(B, [KEY])
    hello = dialer.greet().replace(b"a/1", b"z/9")
    (challenge,) = acceptor.receive(hello)[1]
    (proof,) = dialer.receive(challenge)[1]
    assert find_reason(acceptor, proof) == Refusal.BAD_SEAL


@pytest.mark.parametrize("keys", [[OTHER], []])
def test_another_key_or_none_is_refused(keys: list[PeerKey]) -> None:
    assert find_reason(Channel(B, [KEY]), Channel(A, keys).greet()) == Refusal.UNKNOWN_KEY
    assert find_reason(Channel(B, keys), Channel(A, [KEY]).greet()) == Refusal.UNKNOWN_KEY


def test_who_knows_a_key_s_name_alone_proves_nothing() -> None:
    forger = Channel(A, [PeerKey(KEY.id, b"guessed")])
    acceptor = Channel(B, [KEY])
    (challenge,) = acceptor.receive(forger.greet())[1]
    (proof,) = forger.receive(challenge)[1]
    assert find_reason(acceptor, proof) == Refusal.BAD_SEAL


def test_a_process_does_not_speak_with_itself() -> None:
    assert find_reason(Channel(A, [KEY]), Channel(A, [KEY]).greet()) == Refusal.FOREIGN_ORIGIN


@given(st.binary(max_size=200))
def test_garbage_is_no_greeting(frame: bytes) -> None:
    assert find_reason(Channel(B, [KEY]), frame) == Refusal.NO_PROOF
    dialer = Channel(A, [KEY])
    dialer.greet()
    assert find_reason(dialer, frame) == Refusal.NO_PROOF


def test_while_keys_change_both_ends_find_one_they_share() -> None:
    dialer, acceptor = join(Channel(A, [OTHER, KEY]), Channel(B, [KEY]))
    assert dialer.key == acceptor.key == KEY
    dialer, acceptor = join(Channel(A, [KEY, OTHER]), Channel(B, [OTHER, KEY]))
    assert dialer.key == acceptor.key == OTHER, "the acceptor prefers"


# The file.


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def look(keys: PeerKeys, clock: Clock, seconds: float = 6.0) -> bool:
    clock.now += seconds
    return keys.look()


def test_a_key_that_left_the_file_stays_good_for_a_while(tmp_path: Path) -> None:
    path, clock = tmp_path / "key", Clock()
    path.write_bytes(b"k" * 32 + b"\n")
    worker = make_worker_key("secret")
    keys = PeerKeys(path, clock, own=(worker,))
    assert look(keys, clock)
    assert list(keys.current) == [KEY, worker]
    path.write_bytes(b"o" * 32)
    assert look(keys, clock)
    assert list(keys.current) == [OTHER, KEY, worker]
    assert not look(keys, clock)
    assert look(keys, clock, peer_keys.KEEP_SECONDS)
    assert list(keys.current) == [OTHER, worker]


def test_a_file_that_cannot_be_used_changes_nothing_and_is_told_once(tmp_path: Path) -> None:
    path, clock = tmp_path / "key", Clock()
    path.write_bytes(b"k" * 32)
    keys = PeerKeys(path, clock)
    look(keys, clock)
    with capture_logs() as told:
        for content in (b"", b"short", b"\n\n"):
            path.write_bytes(content)
            assert not look(keys, clock)
            assert not look(keys, clock)
        path.unlink()
        look(keys, clock)
    assert keys.current == (KEY,)
    assert [line["log_level"] for line in told] == ["warning"] * 4, (
        "an empty and a blank file are told apart by short"
    )
    assert not [line for line in told if b"k" * 16 in repr(line).encode()]


def test_keys_are_lines_and_their_names_tell_nothing(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"%b\r\n\n%b\n%b\n" % (b"k" * 32, b"o" * 32, b"k" * 32))
    assert read_keys(path) == (KEY, OTHER)
    assert KEY.id not in KEY.secret
    for content, what in ((b"\n", "no key"), (os.urandom(3).hex().encode(), "shorter than 16")):
        path.write_bytes(content)
        with pytest.raises(PeerKeyError, match=what):
            read_keys(path)
    with pytest.raises(PeerKeyError, match="No such file"):
        read_keys(tmp_path / "none")
