"""One pool's router: its endpoints, load, speeds and index, and the choice over them.

The order of use for each request: `choose`, `reserve`, send, `first_token` at the first chunk, `release` once
from one finaliser. All methods are synchronous and take `now`; the same object runs in the gateway and in the
simulator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

import msgspec

from millpond_gateway.routing.candidates import filter_candidates
from millpond_gateway.routing.cost import compute_kv_blocks, compute_price, compute_score
from millpond_gateway.routing.demand import WorkRate
from millpond_gateway.routing.faces import DecisionSink, PeerObserver
from millpond_gateway.routing.index import NOTHING, PrefixIndex
from millpond_gateway.routing.load import OWN, LoadBook
from millpond_gateway.routing.partition import choose_by_hash
from millpond_gateway.routing.policies import Chooser
from millpond_gateway.routing.records import (
    Choice,
    ChoiceReason,
    Drop,
    EndpointView,
    KeyKind,
    Policy,
    ReplicaLoad,
    RequestView,
    Reservation,
    Role,
    TenantHolds,
    Usage,
)
from millpond_gateway.routing.score import Score
from millpond_gateway.routing.sessions import SessionBook
from millpond_gateway.routing.settings import RoutingSettings
from millpond_gateway.routing.speed import SpeedBook
from millpond_gateway.routing.stability import StabilityBook

_MAX_FORMER_EPOCHS: Final = 8
_MAX_FILTERED: Final = 256


class Router:
    """Chooses replicas of one pool and keeps the books that the choice rests on."""

    def __init__(self, pool: str, settings: RoutingSettings, *, seed: int) -> None:
        self.pool = pool
        self.settings = settings
        self.load = LoadBook()
        self.speeds = SpeedBook(settings.default_tokens_per_second)
        self.index = PrefixIndex(settings)
        self.work = WorkRate()
        self.sessions = SessionBook()
        self.stability = StabilityBook()
        self.num_by_key_kind = dict.fromkeys(KeyKind, 0)
        """Requests by what their keys came from: a rising share of fallbacks is an alarm."""
        self._chooser = Chooser(seed)
        self._endpoints: dict[str, EndpointView] = {}
        self._ejected: frozenset[str] = frozenset()
        self._filtered: dict[tuple[Role, str | None, str], tuple[list[EndpointView], list[Drop]]] = {}
        self._former_epochs: dict[str, deque[str]] = {}
        self._next_id = 0
        self._sink: DecisionSink | None = None
        self._observer: PeerObserver | None = None
        self._told_held = (0, 0, 0)
        self._partition_gateways = 1

    @property
    def endpoints(self) -> tuple[EndpointView, ...]:
        """Endpoints as last told."""
        return tuple(self._endpoints.values())

    @property
    def num_endpoints(self) -> int:
        """How many there are."""
        return len(self._endpoints)

    def set_settings(self, settings: RoutingSettings) -> None:
        """Follow a changed pool; books and index stay."""
        self.settings = settings
        self.index.set_settings(settings)

    def set_ejected(self, uids: AbstractSet[str]) -> None:
        """Take endpoints out of the choice because of faults; see `flow.outliers`."""
        self._ejected = frozenset(uids)
        self._filtered.clear()

    def set_sink(self, sink: DecisionSink | None) -> None:
        """Tell `sink` of every own decision from now on."""
        self._sink = sink

    def set_observer(self, observer: PeerObserver | None) -> None:
        """Tell `observer` of every peer's request from now on."""
        self._observer = observer

    def set_partition(self, num_gateways: int) -> None:
        """Fall back to hashing while peers are unreachable; `num_gateways` is their last known count plus one.

        1 ends the fallback.
        """
        self._partition_gateways = max(num_gateways, 1)

    def update_endpoints(self, endpoints: Iterable[EndpointView]) -> tuple[str, ...]:
        """Replace the endpoint set; forget load, speed and index of what is gone or began anew.

        Returns the uids whose books were dropped, so that waiting requests can be decided again.
        """
        current = {endpoint.uid: self._with_epoch(endpoint) for endpoint in endpoints}
        gone = [uid for uid in self._endpoints if uid not in current]
        restarted = [
            uid for uid, new in current.items() if uid in self._endpoints and self._restarted(uid, new.epoch)
        ]
        for uid in gone + restarted:
            self._forget(uid)
        for uid in gone:
            self.index.close_stream(uid)
            self._former_epochs.pop(uid, None)
        self._endpoints = current
        self._filtered.clear()
        for uid, endpoint in current.items():
            self.speeds.set_prior(uid, endpoint.prefill_tokens_per_second)
        return tuple(gone + restarted)

    def note_epoch(self, uid: str, epoch: str) -> bool:
        """Learn an engine's epoch from a response header or its events; True when it had begun anew.

        The endpoint then counts as the new engine at once, before the next view of the fleet says so.
        """
        endpoint = self._endpoints.get(uid)
        if endpoint is None or endpoint.epoch == epoch:
            return False
        if epoch in self._former_epochs.get(uid, ()):
            return False  # a late answer of the engine's former life
        restarted = self._restarted(uid, epoch)
        if restarted:
            self._forget(uid)
        self._endpoints[uid] = msgspec.structs.replace(endpoint, epoch=epoch)
        self._filtered.clear()
        stream = self.index.find_stream(uid)
        if stream is not None:
            stream.restart(epoch)
        return restarted

    def choose(self, request: RequestView, now: float, *, excluded: AbstractSet[str] = frozenset()) -> Choice:
        """Pick an endpoint, or say why none; books nothing. `excluded` are endpoints this request tried already."""
        policy = self.settings.policy
        candidates, drops = self._filter(request, excluded)
        candidates, revision_drops = self._chooser.draw_revision(
            candidates, request, self.settings.revision_weights
        )
        if revision_drops:
            drops = drops + revision_drops
        if not candidates:
            reason = ChoiceReason.NO_CANDIDATE if drops else ChoiceReason.NO_ENDPOINT
            return Choice(endpoint=None, reason=reason, policy=policy, drops=tuple(drops))
        scores = self._score(candidates, request, now)
        if self._partition_gateways > 1 and policy is not Policy.ROUND_ROBIN:
            position, reason = choose_by_hash(scores, request, self.settings), ChoiceReason.PARTITION_HASH
        else:
            position, reason = self._chooser.pick(scores, request, self.settings)
        return Choice(
            endpoint=candidates[position],
            reason=reason,
            policy=policy,
            scores=tuple(scores),
            drops=tuple(drops),
            score=scores[position],
        )

    def reserve(self, request: RequestView, choice: Choice, now: float) -> Reservation:
        """Book the chosen endpoint's load, index and session; call it before any byte is sent.

        Raises:
            ValueError: when the choice has no endpoint.
        """
        endpoint = choice.endpoint
        if endpoint is None or choice.score is None:
            raise ValueError(f"request {request.request_id} has no endpoint to reserve on: {choice.reason}")
        self._next_id += 1
        reservation = Reservation(
            id=self._next_id,
            request_id=request.request_id,
            uid=endpoint.uid,
            epoch=endpoint.epoch,
            uncached_tokens=choice.score.uncached_tokens,
            cached_tokens=choice.score.cached_tokens,
            kv_blocks=compute_kv_blocks(endpoint, request, choice.score.uncached_tokens),
            output_tokens=request.expected_output_tokens,
            reserved_at=now,
            session=request.session,
            tenant=request.tenant,
            routed_tokens=choice.score.routed_tokens,
            held_tokens=choice.score.held_tokens,
            tokens_per_key=request.prompt.tokens_per_key,
            budget_tokens=request.budget_tokens,
        )
        self.stability.note(request.tenant, request.session, next(iter(request.prompt.keys), None))
        self.num_by_key_kind[request.prompt.kind] += 1
        self.load.reserve(reservation)
        self._note_routed(reservation, request.prompt.keys, now)
        if self._sink is not None:
            self._sink.reserve(self.pool, reservation, request.prompt.keys)
        return reservation

    def first_token(self, reservation_id: int, now: float) -> bool:
        """Free the prefill part and learn the replica's speed; False when that happened before."""
        if not self.apply_first_token(OWN, reservation_id, now):
            return False
        if self._sink is not None:
            self._sink.first_token(self.pool, reservation_id)
        return True

    def release(
        self, reservation_id: int, usage: Usage | None = None, *, used_tokens: int | None = None
    ) -> bool:
        """Free the rest, whatever ended the request; False when it is gone already.

        `usage` audits the index; `used_tokens` is what the request is taken to have used where the engine told nothing.
        """
        reservation = self.load.release(reservation_id)
        if reservation is None:
            return False
        if self._sink is not None:
            used = usage.prompt_tokens + usage.output_tokens if usage is not None else used_tokens
            self._sink.release(self.pool, reservation_id, used)
        if usage is not None and usage.cached_tokens is not None:
            self.index.audit(reservation, prompt_tokens=usage.prompt_tokens, real=usage.cached_tokens)
        return True

    def note_held(
        self, num_held: int, tokens: int, holds: Callable[[], TenantHolds], *, version: int = 0
    ) -> None:
        """Tell peers what this process holds, so that nobody passes it, and no tenant its limit, elsewhere.

        `version` changes with what the numbers do not show.
        """
        if self._sink is not None and self._told_held != (num_held, tokens, version):
            self._told_held = (num_held, tokens, version)
            self._sink.hold(self.pool, num_held, tokens, holds())

    def apply_hold(self, origin: str, num_held: int, tokens: int, holds: TenantHolds) -> None:
        """A peer holds so much now."""
        if self._observer is not None:
            self._observer.peer_held(origin, num_held, tokens, holds)

    def apply_reserve(self, origin: str, reservation: Reservation, keys: Sequence[int], now: float) -> bool:
        """Book a peer's decision; False when it is booked already or is about an engine's former life."""
        endpoint = self._endpoints.get(reservation.uid)
        if endpoint is not None and _differ(endpoint.epoch, reservation.epoch):
            return False
        if not self.load.reserve(reservation, origin):
            return False
        if self._observer is not None:
            self._observer.peer_reserved(reservation)
        self._note_routed(reservation, keys, now)
        return True

    def apply_first_token(self, origin: str, reservation_id: int, now: float) -> bool:
        """Free the prefill part of an origin's reservation and learn from it."""
        reservation = self.load.first_token(reservation_id, origin, now=now)
        if reservation is None:
            return False
        self.speeds.observe(
            reservation.uid,
            uncached_tokens=reservation.uncached_tokens,
            reserved_at=reservation.reserved_at,
            now=now,
        )
        return True

    def apply_release(self, origin: str, reservation_id: int, used_tokens: int | None = None) -> bool:
        """Free the rest of a peer's reservation."""
        reservation = self.load.release(reservation_id, origin)
        if reservation is None:
            return False
        if self._observer is not None:
            self._observer.peer_released(reservation, used_tokens)
        return True

    def drop_origin(self, origin: str) -> int:
        """Free all a peer reserved: it died or began anew. Returns how many reservations."""
        dropped = self.load.drop_origin(origin)
        if self._observer is not None:
            for reservation in dropped:
                self._observer.peer_released(reservation)
            self._observer.peer_held(origin, 0, 0, TenantHolds())
        return len(dropped)

    def replica_load(self, uid: str) -> ReplicaLoad:
        """Sums reserved on one replica."""
        return self.load.view(uid)

    def cached_tokens(self, uid: str) -> tuple[int, int]:
        """Prompt tokens the index expects on a replica, and the part that no other replica holds."""
        return self.index.count_routed_tokens(uid)

    def _filter(
        self, request: RequestView, excluded: AbstractSet[str]
    ) -> tuple[list[EndpointView], list[Drop]]:
        """Candidates and drops; those of requests that only the endpoints decide about are found once."""
        if excluded or request.prompt.kind is KeyKind.TOKENS:
            return filter_candidates(
                self._endpoints.values(), request, ejected=self._ejected, excluded=excluded
            )
        key = (request.role, request.revision, request.adapter)
        found = self._filtered.get(key)
        if found is None:
            if len(self._filtered) >= _MAX_FILTERED:
                self._filtered.clear()
            found = filter_candidates(self._endpoints.values(), request, ejected=self._ejected)
            self._filtered[key] = found
        return found

    def _score(self, candidates: list[EndpointView], request: RequestView, now: float) -> list[Score]:
        predicted = self.index.predict(request.prompt, now)
        predictions = predicted.replicas
        home = self.sessions.find(request.session)
        settings = self.settings
        speeds = [self.speeds.tokens_per_second(endpoint.uid) for endpoint in candidates]
        pool_speed = sum(speeds)
        price = compute_price(self.work.per_second(now) / pool_speed, settings)
        num_gateways = self._partition_gateways
        scores: list[Score] = []
        for endpoint, speed in zip(candidates, speeds, strict=True):
            uid = endpoint.uid
            prediction = predictions.get(uid, NOTHING)
            missing = predicted.shared_tokens > prediction.cached_tokens
            score = compute_score(
                endpoint,
                self.load.live(uid) if num_gateways == 1 else self.load.scale_own(uid, num_gateways),
                request,
                settings,
                prediction=prediction,
                shared_tokens=predicted.shared_tokens,
                num_reuses=self.index.expect_reuses(predicted, uid, now) if missing else 0.0,
                tokens_per_second=speed,
                mean_tokens_per_second=pool_speed / len(speeds),
                price=price,
                away_from_home=home is not None and home != uid,
                now=now,
            )
            scores.append(score)
        return scores

    def _note_routed(self, reservation: Reservation, keys: Sequence[int], now: float) -> None:
        self.work.add(reservation.uncached_tokens, now)
        endpoint = self._endpoints.get(reservation.uid)
        if endpoint is None:
            return
        self.index.note_routed(endpoint, keys, now, tokens_per_key=reservation.tokens_per_key)
        if reservation.session is not None:
            self.sessions.note(reservation.session, reservation.uid)

    def _with_epoch(self, endpoint: EndpointView) -> EndpointView:
        """The view with what is known of its epoch: a view may be older than an answer that told a newer one."""
        known = self._endpoints.get(endpoint.uid)
        stale = endpoint.epoch is None or endpoint.epoch in self._former_epochs.get(endpoint.uid, ())
        if known is None or known.epoch is None or not stale:
            return endpoint
        return msgspec.structs.replace(endpoint, epoch=known.epoch)

    def _restarted(self, uid: str, epoch: str | None) -> bool:
        """Whether the engine began anew; learning a first epoch is no restart."""
        return _differ(self._endpoints[uid].epoch, epoch)

    def _forget(self, uid: str) -> None:
        epoch = self._endpoints[uid].epoch
        if epoch is not None:
            self._former_epochs.setdefault(uid, deque(maxlen=_MAX_FORMER_EPOCHS)).append(epoch)
        for origin, reservation in self.load.drop_replica(uid):
            if origin == OWN and self._sink is not None:
                self._sink.release(self.pool, reservation.id)
            if origin != OWN and self._observer is not None:
                self._observer.peer_released(reservation)
        self.speeds.drop(uid)
        self.index.forget_blocks(uid)
        self.sessions.drop_replica(uid)


def _differ(epoch: str | None, other: str | None) -> bool:
    return epoch is not None and other is not None and epoch != other
