"""Expected cached tokens per replica, from three layers with confidence.

    E[cached] = c·m2 + (1 - c)·k·m1

m1: blocks that this fleet of gateways routed (base). m2: blocks the replica's KV events say it holds (correction).
k: running ratio of real to predicted cached tokens, from the engines' usage (audit). c: confidence in the events.
What was routed within the last seconds counts even at c = 1, since its events are still to come. Text keys know
only the routed layer and its audit; an engine that lost everything loses it in that layer too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from millpond_gateway.routing.held import ReplicaBlocks
from millpond_gateway.routing.records import EndpointView, KeyKind, PromptKeys, Reservation
from millpond_gateway.routing.routed import RoutedIndex, RoutedMatch
from millpond_gateway.routing.score import Prediction
from millpond_gateway.routing.settings import RoutingSettings
from millpond_gateway.routing.stream import EventStream

_AUDIT_DECAY: Final = 0.95
_LEAST_SECONDS: Final = 0.001
_NO_ROUTED: Final = RoutedMatch(0, 0)


NOTHING: Final = Prediction(0, 0, None)


class Predictions:
    """What the index expects of one prompt."""

    __slots__ = ("replicas", "reuse_seconds", "shared_tokens")

    def __init__(
        self, replicas: dict[str, Prediction], shared_tokens: int, reuse_seconds: float = 0.0
    ) -> None:
        self.replicas = replicas
        """Replicas that are expected to hold nothing are absent."""
        self.shared_tokens = shared_tokens
        """Leading tokens that several sessions share."""
        self.reuse_seconds = reuse_seconds
        """From one use of those to the next on each replica, if one more replica held them."""


class IndexTotals(NamedTuple):
    """Sums over finished requests: three series that tell workload, routing and index loss apart."""

    prompt_tokens: int
    predicted_tokens: int
    routed_tokens: int
    held_tokens: int
    real_tokens: int


class _Audit:
    __slots__ = ("predicted", "real")

    def __init__(self) -> None:
        self.predicted = 0.0
        self.real = 0.0

    @property
    def ratio(self) -> float:
        return self.real / self.predicted if self.predicted > 0 else 1.0

    def note(self, predicted: int, real: int) -> None:
        self.predicted = self.predicted * _AUDIT_DECAY + predicted
        self.real = self.real * _AUDIT_DECAY + min(real, predicted)


class PrefixIndex:
    """What every replica of a pool is expected to hold."""

    def __init__(self, settings: RoutingSettings) -> None:
        self._settings = settings
        self.routed = RoutedIndex(
            max_bytes=settings.index_bytes, speculative_seconds=settings.speculative_seconds
        )
        self._audits: dict[str, _Audit] = {}
        self._streams: dict[str, EventStream] = {}
        self._losses: dict[str, int] = {}
        self._tokens_per_key: dict[str, float] = {}
        self._prompt_tokens = self._predicted_tokens = self._routed_tokens = 0
        self._held_tokens = self._real_tokens = 0

    @property
    def totals(self) -> IndexTotals:
        """Sums since the start."""
        return IndexTotals(
            self._prompt_tokens,
            self._predicted_tokens,
            self._routed_tokens,
            self._held_tokens,
            self._real_tokens,
        )

    @property
    def num_bytes(self) -> int:
        """Memory of all layers."""
        return self.routed.num_bytes + sum(stream.blocks.num_bytes for stream in self._streams.values())

    def set_settings(self, settings: RoutingSettings) -> None:
        """Follow changed settings."""
        self._settings = settings
        self.routed.set_bounds(
            max_bytes=settings.index_bytes, speculative_seconds=settings.speculative_seconds
        )

    def open_stream(self, endpoint: EndpointView) -> EventStream:
        """The endpoint's event stream, made on first use; feed it what the transport receives."""
        stream = self._streams.get(endpoint.uid)
        if stream is None:
            blocks = ReplicaBlocks(
                model=self._settings.model, seed=self._settings.key_seed, num_blocks=endpoint.num_blocks
            )
            stream = self._streams[endpoint.uid] = EventStream(blocks)
            stream.restart(endpoint.epoch)
        return stream

    def find_stream(self, uid: str) -> EventStream | None:
        """The endpoint's stream, if it has one."""
        return self._streams.get(uid)

    def close_stream(self, uid: str) -> None:
        """The endpoint has no events any more: go on without that layer."""
        self._streams.pop(uid, None)
        self._losses.pop(uid, None)

    def predict(self, prompt: PromptKeys, now: float) -> Predictions:
        """Predictions for one prompt."""
        keys = prompt.keys
        if not keys:
            return Predictions({}, 0)
        self._purge_restarted()
        matches = self.routed.match(keys, now)
        routed = matches.replicas
        limit = max(prompt.num_tokens - 1, 0)
        per_key = prompt.tokens_per_key
        found: dict[str, Prediction] = {}
        audits = self._audits
        streams = self._streams if prompt.kind is KeyKind.TOKENS else {}  # events know no text
        for uid, match in routed.items():
            if uid not in streams:
                tokens = min(int(match.num_blocks * per_key), limit)
                audit = audits.get(uid)
                cached = tokens if audit is None else int(audit.ratio * tokens)
                found[uid] = Prediction(cached, tokens, None)
        for uid, stream in streams.items():
            prediction = self._blend(stream, uid, prompt, routed.get(uid, _NO_ROUTED), now)
            if prediction.cached_tokens or prediction.routed_tokens:
                found[uid] = prediction
        shared_tokens = min(int(matches.num_shared_blocks * per_key), limit)
        since_last = max(now - matches.shared_routed_at, _LEAST_SECONDS)
        return Predictions(found, shared_tokens, since_last * (matches.num_shared_copies + 1))

    def expect_reuses(self, predictions: Predictions, uid: str, now: float) -> float:
        """How often a new copy of the shared prefix would be used on a replica before it is evicted there."""
        return self.routed.retention_seconds(uid, now) / predictions.reuse_seconds

    def note_routed(
        self, endpoint: EndpointView, keys: Sequence[int], now: float, *, tokens_per_key: float
    ) -> None:
        """Enter a routed prompt; the replica's blocks bound how many of its keys are kept."""
        stream = self._streams.get(endpoint.uid)
        if stream is not None:
            stream.note_routed(now)
        if keys:
            num_blocks = endpoint.num_blocks or self._settings.default_blocks
            capacity = max(int(num_blocks * endpoint.block_tokens / max(tokens_per_key, 1.0)), 1)
            self._tokens_per_key[endpoint.uid] = tokens_per_key
            self._purge_restarted()
            self.routed.insert(endpoint.uid, keys, capacity=capacity, now=now)

    def audit(self, reservation: Reservation, *, prompt_tokens: int, real: int) -> None:
        """Compare a reservation's prediction with what the engine counted."""
        if reservation.routed_tokens > 0:
            self._audits.setdefault(reservation.uid, _Audit()).note(reservation.routed_tokens, real)
        stream = self._streams.get(reservation.uid)
        if stream is not None and reservation.held_tokens is not None:
            stream.audit(predicted=reservation.held_tokens, real=real)
        self._prompt_tokens += prompt_tokens
        self._predicted_tokens += reservation.cached_tokens
        self._routed_tokens += reservation.routed_tokens
        self._held_tokens += reservation.held_tokens or 0
        self._real_tokens += real

    def forget_blocks(self, uid: str) -> None:
        """Forget what a replica held: its engine began anew. Its stream stays connected."""
        self.routed.drop_replica(uid)
        self._audits.pop(uid, None)
        self._tokens_per_key.pop(uid, None)

    def count_routed_tokens(self, uid: str) -> tuple[int, int]:
        """Tokens of the prefixes routed to a replica, and of those routed to it alone.

        Counts walk the replica's prefixes: for a report now and then, not for a choice.
        """
        per_key = self._tokens_per_key.get(uid, 0.0)
        blocks, unique = self.routed.num_blocks(uid), self.routed.count_unique_blocks(uid)
        return int(blocks * per_key), int(unique * per_key)

    def confidence(self, uid: str, now: float) -> float | None:
        """Trust in the replica's events; None without a stream."""
        stream = self._streams.get(uid)
        return None if stream is None else stream.confidence(now)

    def _purge_restarted(self) -> None:
        """Forget what was routed to engines whose streams tell that they lost everything since."""
        for uid, stream in self._streams.items():
            if stream.num_losses != self._losses.get(uid, 0):
                self._losses[uid] = stream.num_losses
                self.forget_blocks(uid)

    def _blend(
        self, stream: EventStream, uid: str, prompt: PromptKeys, routed: RoutedMatch, now: float
    ) -> Prediction:
        limit = max(prompt.num_tokens - 1, 0)
        confidence = stream.confidence(now)
        routed_tokens = min(routed.num_blocks * prompt.tokens_per_key, limit)
        held_tokens = min(stream.blocks.match(prompt.keys).credit_blocks * prompt.tokens_per_key, limit)
        recent_tokens = min(routed.num_recent_blocks * prompt.tokens_per_key, limit)
        expected = confidence * max(held_tokens, recent_tokens)
        expected += (1.0 - confidence) * self._ratio(uid) * routed_tokens
        return Prediction(int(expected), int(routed_tokens), int(held_tokens))

    def _ratio(self, uid: str) -> float:
        audit = self._audits.get(uid)
        return 1.0 if audit is None else audit.ratio
