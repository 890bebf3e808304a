"""One replica's KV-event stream: order, gaps, restarts, and how far the index may trust it. Pure.

The transport feeds `live`, `replayed`, `replay_ended` and `snapshot`, and does what they ask for. A gap is filled
before the live batch that showed it; nothing is applied twice. A new epoch, or a sequence that runs backwards, is
a restart: everything known of the replica is dead. Several ranks are several streams.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from millpond_gateway.routing.held import ReplicaBlocks
from millpond_gateway.routing.kvevents import (
    Cleared,
    Event,
    EventBatch,
    Heartbeat,
    PayloadError,
    decode_batch,
)

_MAX_PENDING = 1024
_SILENCE_SECONDS = 5.0
_GAP_FACTOR = 0.5
_BAD_FACTOR = 0.9
_DISAGREE_FACTOR = 0.8
_RECOVERY = 0.05
_AGREEMENT = 0.05
"""Predicted and real cached tokens this close, relatively, agree."""


class AskKind(StrEnum):
    """What the transport should fetch."""

    REPLAY = "Replay"
    SNAPSHOT = "Snapshot"


class Ask(NamedTuple):
    """A fetch; `from_sequence` is the first batch wanted."""

    kind: AskKind
    from_sequence: int = 0


class StreamCounts(NamedTuple):
    """Counters since start, for metrics."""

    num_batches: int
    num_gaps: int
    num_restarts: int
    num_bad_events: int
    num_unindexed_blocks: int


class EventStream:
    """State of one stream and its confidence in [0, 1]."""

    def __init__(self, blocks: ReplicaBlocks) -> None:
        self.blocks = blocks
        self.epoch: str | None = None
        self.num_losses = 0
        """How often the engine lost all blocks: restarts and clears."""
        self._confidence = 0.0
        self._before_gap = 0.0
        self._complete = False
        self._next: int | None = None
        self._pending: dict[int, bytes] = {}
        self._replaying = False
        self._heard_at = float("-inf")
        self._routed_at = float("-inf")
        self._num_batches = 0
        self._num_gaps = 0
        self._num_restarts = 0
        self._num_bad = 0
        self._num_unindexed = 0

    @property
    def counts(self) -> StreamCounts:
        """Counters since start."""
        return StreamCounts(
            self._num_batches, self._num_gaps, self._num_restarts, self._num_bad, self._num_unindexed
        )

    @property
    def synced(self) -> bool:
        """Every event since the engine's start, or since a snapshot, was applied."""
        return self._complete and not self._pending

    def confidence(self, now: float) -> float:
        """Trust in the event layer at `now`; silence while requests flow halves it."""
        silent = self._routed_at > self._heard_at and now - self._heard_at > _SILENCE_SECONDS
        return self._confidence * (0.5 if silent else 1.0)

    def note_routed(self, now: float) -> None:
        """A request went to the replica: events are due."""
        self._routed_at = now

    def live(self, sequence: int, payload: bytes, now: float) -> list[Ask]:
        """Take a batch of the live stream."""
        self._heard_at = now
        if self._next is not None and sequence < self._next:
            if not self._is_restart(payload):
                return []
            self._begin_anew()
        if self._next is None:
            if sequence == 0:
                self._complete = True
                self._confidence = 1.0
                self._next = 0
            else:
                return self._open_gap(0, sequence, payload)
        if sequence > self._next or self._replaying:
            return self._open_gap(self._next, sequence, payload)
        return self._apply_payload(sequence, payload)

    def replayed(self, sequence: int, payload: bytes, now: float) -> list[Ask]:
        """Take one batch of a replay; batches known already are skipped."""
        self._heard_at = now
        if self._next is None:
            self._complete = sequence == 0
            self._next = sequence
        if sequence < self._next:
            return []
        if sequence > self._next:
            self._complete = False  # older history is gone
        self._next = sequence
        return self._apply_payload(sequence, payload)

    def replay_ended(self) -> list[Ask]:
        """The replay's end marker: apply what came live meanwhile; ask for a snapshot if the gap stays."""
        self._replaying = False
        asks: list[Ask] = []
        for sequence in sorted(self._pending):
            payload = self._pending.pop(sequence)
            if self._next is not None and sequence < self._next:
                continue
            if self._next is None or sequence > self._next:
                self._complete = False
            self._next = sequence
            asks += self._apply_payload(sequence, payload)
        if self._complete:
            self._confidence = self._before_gap or 1.0
            return asks
        return [*asks, Ask(AskKind.SNAPSHOT)]

    def snapshot(
        self, payloads: Iterable[bytes], *, resume_sequence: int, epoch: str | None, now: float
    ) -> list[Ask]:
        """Replace everything by a snapshot; the live stream goes on at `resume_sequence`.

        Batches that came live meanwhile follow at once; if some are missing before them, asks for a replay.
        """
        self._heard_at = now
        self.blocks.clear()
        self.epoch = epoch or self.epoch
        self._complete = True
        self._confidence = self._before_gap = 1.0
        for payload in payloads:
            self._apply_snapshot_part(payload)
        self._next = resume_sequence
        self._pending = {seq: payload for seq, payload in self._pending.items() if seq >= resume_sequence}
        if self._pending and min(self._pending) > resume_sequence:
            self._replaying = True
            return [Ask(AskKind.REPLAY, resume_sequence)]
        return self.replay_ended()

    def restart(self, epoch: str | None) -> None:
        """The engine began anew, as told by another source: a response header or its state."""
        if epoch is not None and epoch != self.epoch:
            if self.epoch is not None:
                self._begin_anew()
            self.epoch = epoch

    def audit(self, *, predicted: int, real: int) -> None:
        """Compare this layer's prediction with the engine's count."""
        if abs(predicted - real) <= _AGREEMENT * max(predicted, real, 1):
            ceiling = 1.0 if self._complete else 0.9
            self._confidence += _RECOVERY * max(ceiling - self._confidence, 0.0)
        else:
            self._confidence *= _DISAGREE_FACTOR

    def _is_restart(self, payload: bytes) -> bool:
        """Tell a restarted publisher from a duplicate; without an epoch a sequence never runs backwards otherwise."""
        try:
            epoch = decode_batch(payload).epoch
        except PayloadError:
            return False
        return epoch is None or self.epoch is None or epoch != self.epoch

    def _begin_anew(self) -> None:
        self.blocks.clear()
        self.epoch = None
        self._confidence = self._before_gap = 0.0
        self._complete = False
        self._next = None
        self._pending.clear()
        self._replaying = False
        self._num_restarts += 1
        self.num_losses += 1

    def _open_gap(self, first_missing: int, sequence: int, payload: bytes) -> list[Ask]:
        if len(self._pending) < _MAX_PENDING:
            self._pending[sequence] = payload
        if self._replaying:
            return []
        self._num_gaps += 1
        self._replaying = True
        self._before_gap = self._confidence
        self._confidence *= _GAP_FACTOR
        return [Ask(AskKind.REPLAY, first_missing)]

    def _apply_snapshot_part(self, payload: bytes) -> None:
        try:
            batch = decode_batch(payload)
        except PayloadError:
            self._num_bad += 1
            self._confidence *= _BAD_FACTOR
            return
        self._apply_events(batch)

    def _apply_payload(self, sequence: int, payload: bytes) -> list[Ask]:
        self._next = sequence + 1
        self._num_batches += 1
        try:
            batch = decode_batch(payload)
        except PayloadError:
            self._num_bad += 1
            self._confidence *= _BAD_FACTOR
            return []
        if batch.epoch is not None and batch.epoch != self.epoch:
            known, self.epoch = self.epoch, batch.epoch
            if known is not None:
                self._begin_anew()
                self.epoch = batch.epoch
                return self.live(sequence, payload, self._heard_at)
        return self._apply_events(batch)

    def _apply_events(self, batch: EventBatch) -> list[Ask]:
        applied = self.blocks.apply(batch.events)
        self._num_bad += batch.num_bad
        self._num_unindexed += applied.num_unindexed
        self.num_losses += sum(isinstance(event, Cleared) for event in batch.events)
        if batch.num_bad:
            self._confidence *= _BAD_FACTOR
        elif self._complete:
            self._confidence += _RECOVERY * (1.0 - self._confidence)
        if self.blocks.overflowed:
            self._complete = False
            self._confidence = 0.0
            self.blocks.clear()
            return [Ask(AskKind.SNAPSHOT)]
        return self._check_heartbeats(batch.events)

    def _check_heartbeats(self, events: Iterable[Event]) -> list[Ask]:
        """A heartbeat tells the last sequence: a gap shows although nothing follows."""
        for event in events:
            if not isinstance(event, Heartbeat) or event.sequence is None or self._next is None:
                continue
            if event.sequence >= self._next and not self._replaying:
                self._num_gaps += 1
                self._replaying = True
                self._confidence *= _GAP_FACTOR
                return [Ask(AskKind.REPLAY, self._next)]
        return []
