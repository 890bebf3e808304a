"""A keyed channel between two gateway processes over one connection; no input or output of its own.

    dialer -> acceptor   Hello      nonce, who it is, which keys it has
    acceptor -> dialer   Challenge  nonce, who it is, which of the keys it took
    both directions      sealed     MAC (16 bytes), message

Both derive two session keys, one for each direction, from the shared key and from what was said so far, nonces and names
included. A sealed message carries HMAC-SHA-256, cut to 128 bits, over its number and its bytes: one that was forged,
changed, left out, repeated or recorded on another connection fails. The first sealed message of each side is empty and
proves that it has the key. Messages are authentic, not secret: they hold no prompt.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

NONCE_BYTES: Final = 32
MAC_BYTES: Final = 16
MAX_GREETING_BYTES: Final = 4096
_MAX_KEYS: Final = 16
_ID_LABEL: Final = b"millpond gateway peers 1 id"
_SESSION_LABEL: Final = b"millpond gateway peers 1 session"
_DIALER: Final = b"dialer"
_ACCEPTOR: Final = b"acceptor"


class PeerRefusedError(Exception):
    """The other end has not proved what it claims; `reason` is one word of `Refusal`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Refusal:
    """Why a connection of a peer was refused: one word for one cause, in metric and log."""

    UNKNOWN_ADDRESS: Final = "UnknownAddress"
    NO_PROOF: Final = "NoProof"
    """It speaks without a key, as gateways of former versions do, or says nothing."""
    UNKNOWN_KEY: Final = "UnknownKey"
    BAD_SEAL: Final = "BadSeal"
    """Forged, changed, repeated or recorded elsewhere."""
    FOREIGN_ORIGIN: Final = "ForeignOrigin"
    """It proved to be one process and spoke as another."""
    NO_MESSAGE: Final = "NoMessage"


class PeerKey(NamedTuple):
    """A shared key and its public name."""

    id: bytes
    secret: bytes


class PeerIdentity(NamedTuple):
    """One life of one gateway process."""

    origin: str
    epoch: int


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="H"):
    """What the dialer says first."""

    nonce: bytes
    origin: str
    epoch: int
    keys: tuple[bytes, ...]


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag="C"):
    """What the acceptor answers."""

    nonce: bytes
    origin: str
    epoch: int
    key: bytes


_encoder = msgspec.msgpack.Encoder()
_hello = msgspec.msgpack.Decoder(Hello)
_challenge = msgspec.msgpack.Decoder(Challenge)


def make_key(secret: bytes) -> PeerKey:
    """A key under the name that tells nothing about it."""
    return PeerKey(hmac.digest(secret, _ID_LABEL, "sha256")[:8], secret)


class Channel:
    """One end of one connection. Any error it raises ends the connection: nothing after it can be trusted."""

    __slots__ = (
        "_hello",
        "_keys",
        "_me",
        "_received",
        "_receiving",
        "_sending",
        "_sent",
        "key",
        "peer",
        "proved",
    )

    def __init__(self, me: PeerIdentity, keys: Sequence[PeerKey]) -> None:
        self._me = me
        self._keys = tuple(keys[:_MAX_KEYS])
        self._hello: bytes | None = None
        self._sending = self._receiving = b""
        self._sent = self._received = 0
        self.key: PeerKey | None = None
        """Shared by both ends; None until they have agreed on one."""
        self.peer: PeerIdentity | None = None
        """Who the other end says it is, true once `proved`."""
        self.proved = False

    def greet(self) -> bytes:
        """The dialer's first message."""
        me = self._me
        ids = tuple(key.id for key in self._keys)
        self._hello = _encoder.encode(Hello(secrets.token_bytes(NONCE_BYTES), me.origin, me.epoch, ids))
        return self._hello

    def receive(self, frame: bytes) -> tuple[bytes | None, tuple[bytes, ...]]:
        """Take a frame: the message in it, if one, and frames to send because of it.

        Raises:
            PeerRefusedError: the other end has no key of ours, or not the one it claims.
        """
        if self.key is None:
            return None, self._take_greeting(frame)
        message = self._open(frame)
        answer = () if self.proved or self._sent else (self.seal(b""),)
        self.proved = True
        return message or None, answer

    def seal(self, message: bytes) -> bytes:
        """The frame of one message."""
        mac = _compute_mac(self._sending, self._sent, message)
        self._sent += 1
        return mac + message

    def _open(self, frame: bytes) -> bytes:
        message = frame[MAC_BYTES:]
        expected = _compute_mac(self._receiving, self._received, message)
        if not hmac.compare_digest(expected, frame[:MAC_BYTES]):
            raise PeerRefusedError(Refusal.BAD_SEAL, "a message is not sealed by the key of this connection")
        self._received += 1
        return message

    def _take_greeting(self, frame: bytes) -> tuple[bytes, ...]:
        if len(frame) > MAX_GREETING_BYTES:
            raise PeerRefusedError(Refusal.NO_PROOF, "no greeting of a gateway with a key")
        try:
            if self._hello is None:
                return self._accept(frame, _hello.decode(frame))
            return self._confirm(frame, _challenge.decode(frame))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise PeerRefusedError(Refusal.NO_PROOF, "no greeting of a gateway with a key") from error

    def _accept(self, frame: bytes, hello: Hello) -> tuple[bytes, ...]:
        """The acceptor's answer to a Hello."""
        key = find_common(self._keys, hello.keys)
        me = self._me
        self._check(hello.nonce, PeerIdentity(hello.origin, hello.epoch))
        challenge = _encoder.encode(Challenge(secrets.token_bytes(NONCE_BYTES), me.origin, me.epoch, key.id))
        self._agree(key, frame, challenge, sends_as=_ACCEPTOR, hears=_DIALER)
        return (challenge,)

    def _confirm(self, frame: bytes, challenge: Challenge) -> tuple[bytes, ...]:
        """The dialer's proof, in answer to a Challenge."""
        key = find_common(self._keys, (challenge.key,))
        self._check(challenge.nonce, PeerIdentity(challenge.origin, challenge.epoch))
        assert self._hello is not None
        self._agree(key, self._hello, frame, sends_as=_DIALER, hears=_ACCEPTOR)
        return (self.seal(b""),)

    def _check(self, nonce: bytes, peer: PeerIdentity) -> None:
        if len(nonce) != NONCE_BYTES:
            raise PeerRefusedError(Refusal.NO_PROOF, "no greeting of a gateway with a key")
        if peer.origin == self._me.origin:
            raise PeerRefusedError(Refusal.FOREIGN_ORIGIN, "the other end says that it is this process")
        self.peer = peer

    def _agree(self, key: PeerKey, hello: bytes, challenge: bytes, *, sends_as: bytes, hears: bytes) -> None:
        said = len(hello).to_bytes(4, "big") + hello + challenge
        session = hmac.digest(key.secret, _SESSION_LABEL + said, "sha256")
        self._sending = hmac.digest(session, sends_as, "sha256")
        self._receiving = hmac.digest(session, hears, "sha256")
        self.key = key


def find_common(keys: Iterable[PeerKey], ids: Sequence[bytes]) -> PeerKey:
    """The first of our keys that the other end has too.

    Raises:
        PeerRefusedError: there is none.
    """
    for key in keys:
        if key.id in ids:
            return key
    raise PeerRefusedError(Refusal.UNKNOWN_KEY, "the other end has another key")


def _compute_mac(key: bytes, number: int, message: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + message, "sha256")[:MAC_BYTES]
