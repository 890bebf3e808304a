"""Publishes KV events over ZeroMQ from a thread of its own; the engine thread only appends to a bounded queue.

When the queue overflows, batches are dropped, their sequences are used up so that consumers see the gap, and
the next message clears the replica: its true content becomes known again block by block.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from dataclasses import dataclass

import structlog
import zmq

from millpond_common.contract import kv_events as wire
from millpond_common.pace import Pace
from millpond_engine.loop.kv_resident import ResidentBlocks
from millpond_engine.records.outputs import CacheCleared, CacheEvent

log = structlog.get_logger(__name__)

_SNAPSHOT_CHUNK = 64
"""Events of one message of a snapshot."""
_IDLE_MILLISECONDS = 20
_ANSWERING_SHARE = 0.25
"""Of this thread's time, and so of the interpreter that it shares: who asks without end must not slow the engine."""


@dataclass(frozen=True, slots=True)
class PublisherSettings:
    """Where to publish, and how much to keep."""

    endpoint: str = "tcp://*:5557"
    replay_endpoint: str = "tcp://*:5558"
    topic: bytes = wire.TOPIC
    form: wire.Form = "map"
    max_queued_batches: int = 100_000
    retained_batches: int = 10_000
    high_water_mark: int = 100_000
    heartbeat_seconds: float = wire.HEARTBEAT_SECONDS


class KvPublisher:
    """Numbers, publishes and retains batches; answers replay and snapshot.

    Raises:
        OSError: from the constructor, when an endpoint cannot be bound.
    """

    def __init__(self, settings: PublisherSettings, resident: ResidentBlocks, *, epoch: str) -> None:
        self._settings = settings
        self._resident = resident
        self._epoch = epoch
        self._queue: deque[tuple[CacheEvent, ...]] = deque()
        self._num_dropped = 0
        self._lock = threading.Lock()
        self._retained: deque[tuple[int, bytes]] = deque(maxlen=settings.retained_batches)
        self._next = 0
        self._sent_at = 0.0
        self._rests_until = 0.0
        self._malformed = Pace(seconds=1.0)
        self._stopping = threading.Event()
        self._context = zmq.Context()
        self._publish_socket = self._bind(zmq.PUB, settings.endpoint)
        self._replay_socket = self._bind(zmq.ROUTER, settings.replay_endpoint)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self.num_dropped = 0
        """Batches dropped since start."""

    @property
    def endpoint(self) -> str:
        """Address of the PUB socket."""
        return self._publish_socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def replay_endpoint(self) -> str:
        """Address of the ROUTER socket."""
        return self._replay_socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def sequence(self) -> int:
        """Sequence of the newest message; 0 before the first."""
        return max(0, self._next - 1)

    def start(self) -> None:
        """Begin to publish."""
        self._thread.start()

    def publish(self, events: tuple[CacheEvent, ...]) -> None:
        """Queue the events of one step; never waits."""
        with self._lock:
            if len(self._queue) >= self._settings.max_queued_batches:
                self._num_dropped += len(self._queue) + 1
                self._queue.clear()
                return
            self._queue.append(events)

    def stop(self) -> None:
        """End the thread and close the sockets. Idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(2.0)
        for socket in (self._publish_socket, self._replay_socket):
            socket.close(linger=0)
        self._context.term()

    def _bind(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, self._settings.high_water_mark)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(error.errno, f"{endpoint} cannot be bound: {error}") from error
        return socket

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                idle = not self._send_queued()
                if self._wait_for_question(idle=idle):
                    self._answer()
                if time.monotonic() - self._sent_at >= self._settings.heartbeat_seconds:
                    self._send([wire.Heartbeat(self.sequence)])
        except zmq.ContextTerminated:
            return
        except Exception:
            log.exception("kv event publisher ended")

    def _wait_for_question(self, *, idle: bool) -> bool:
        """Wait a little when there is nothing else to do; whether a question may be answered now."""
        if time.monotonic() < self._rests_until:
            if idle:
                self._stopping.wait(_IDLE_MILLISECONDS / 1000)
            return False
        return bool(self._replay_socket.poll(_IDLE_MILLISECONDS if idle else 0))

    def _send_queued(self) -> bool:
        """Publish what the engine thread queued; False when there was nothing."""
        with self._lock:
            batches = [self._queue.popleft() for _ in range(min(len(self._queue), 64))]
            dropped, self._num_dropped = self._num_dropped, 0
        if dropped:
            log.warning("kv events dropped", num_batches=dropped)
            self.num_dropped += dropped
            self._next += dropped
            self._send(self._resident.apply(CacheCleared()))
        for events in batches:
            made = [made for event in events for made in self._resident.apply(event)]
            if made:
                self._send(made)
        return bool(batches)

    def _send(self, events: list[wire.KvEvent]) -> None:
        sequence, self._next = self._next, self._next + 1
        payload = self._encode(events)
        self._retained.append((sequence, payload))
        self._sent_at = time.monotonic()
        frames = [self._settings.topic, wire.encode_sequence(sequence), payload]
        with contextlib.suppress(zmq.Again):  # PUB drops by itself; nothing to wait for
            self._publish_socket.send_multipart(frames, flags=zmq.NOBLOCK)

    def _encode(self, events: list[wire.KvEvent]) -> bytes:
        stamp = wire.EventStamp(self._epoch, self._resident.stored_total, self._resident.removed_total)
        return wire.encode_batch(events, stamp, seconds=time.time(), form=self._settings.form)

    def _answer(self) -> None:
        """Answer one question on the replay socket, and rest after it; malformed ones are dropped."""
        started = time.monotonic()
        self._answer_frames(self._replay_socket.recv_multipart())
        now = time.monotonic()
        self._rests_until = now + (now - started) * (1 / _ANSWERING_SHARE - 1)

    def _answer_frames(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or frames[1] != b"":
            if times := self._malformed.count():
                log.warning("malformed replay request", num_frames=len(frames), times=times)
            return
        client, _, asked = frames
        if asked == wire.SNAPSHOT_REQUEST:
            self._answer_snapshot(client)
        elif len(asked) == 8:
            self._answer_replay(client, int.from_bytes(asked, "big"))

    def _answer_replay(self, client: bytes, start: int) -> None:
        for sequence, payload in list(self._retained):
            if sequence >= start and not self._reply(client, sequence, payload):
                return
        self._reply(client, wire.END_SEQUENCE, b"")

    def _answer_snapshot(self, client: bytes) -> None:
        chunk: list[wire.KvEvent] = []
        resume = self._next
        for event in self._resident.list_stored():
            chunk.append(event)
            if len(chunk) == _SNAPSHOT_CHUNK:
                if not self._reply(client, resume, self._encode(chunk)):
                    return
                chunk = []
        if chunk and not self._reply(client, resume, self._encode(chunk)):
            return
        end = wire.encode_snapshot_end(wire.SnapshotEnd(self._epoch, resume))
        self._reply(client, wire.END_SEQUENCE, end)

    def _reply(self, client: bytes, sequence: int, payload: bytes) -> bool:
        """Send one message; False when the client does not read: it is given up, live events come first."""
        frames = [client, b"", self._settings.topic, wire.encode_sequence(sequence), payload]
        try:
            self._replay_socket.send_multipart(frames, flags=zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True
