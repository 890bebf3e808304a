"""One pool's router: its endpoints, load, speeds and index, and the choice over them.

The order of use for each request: `choose`, `reserve`, send, `first_token` at the first chunk, `release` once
from one finaliser. All methods are synchronous and take `now`; the same object runs in the gateway and in the
simulator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

import msgspec

from millpond_gateway.routing.candidates import filter_candidates
from millpond_gateway.routing.cost import compute_kv_blocks, compute_score
from millpond_gateway.routing.index import PrefixIndex
from millpond_gateway.routing.load import LoadBook
from millpond_gateway.routing.policies import Chooser
from millpond_gateway.routing.records import (
    Choice,
    ChoiceReason,
    EndpointView,
    Policy,
    ReplicaLoad,
    RequestView,
    Reservation,
    Score,
    Usage,
)
from millpond_gateway.routing.sessions import SessionBook
from millpond_gateway.routing.settings import RoutingSettings
from millpond_gateway.routing.speed import SpeedBook


class Router:
    """Chooses replicas of one pool and keeps the books that the choice rests on."""

    def __init__(self, pool: str, settings: RoutingSettings, *, seed: int) -> None:
        self.pool = pool
        self.settings = settings
        self.load = LoadBook()
        self.speeds = SpeedBook(settings.default_tokens_per_second)
        self.index = PrefixIndex(settings)
        self.sessions = SessionBook()
        self._chooser = Chooser(seed)
        self._endpoints: dict[str, EndpointView] = {}
        self._ejected: frozenset[str] = frozenset()
        self._next_id = 0

    @property
    def endpoints(self) -> tuple[EndpointView, ...]:
        """Endpoints as last told."""
        return tuple(self._endpoints.values())

    def set_settings(self, settings: RoutingSettings) -> None:
        """Follow a changed pool; books and index stay."""
        self.settings = settings
        self.index.set_settings(settings)

    def set_ejected(self, uids: AbstractSet[str]) -> None:
        """Take endpoints out of the choice because of faults; see `flow.outliers`."""
        self._ejected = frozenset(uids)

    def update_endpoints(self, endpoints: Iterable[EndpointView]) -> tuple[str, ...]:
        """Replace the endpoint set; forget load, speed and index of what is gone or began anew.

        Returns the uids whose books were dropped, so that waiting requests can be decided again.
        """
        current = {endpoint.uid: endpoint for endpoint in endpoints}
        dropped = [uid for uid, old in self._endpoints.items() if _began_anew(old, current.get(uid))]
        for uid in dropped:
            self._forget(uid)
        for uid, endpoint in current.items():
            self.speeds.set_prior(uid, endpoint.prefill_tokens_per_second)
        self._endpoints = current
        return tuple(dropped)

    def choose(self, request: RequestView, now: float, *, excluded: AbstractSet[str] = frozenset()) -> Choice:
        """Pick an endpoint, or say why none; books nothing. `excluded` are endpoints this request tried already."""
        policy = self.settings.policy
        candidates, drops = filter_candidates(
            self._endpoints.values(), request, ejected=self._ejected, excluded=excluded
        )
        candidates, revision_drops = self._chooser.draw_revision(
            candidates, request, self.settings.revision_weights
        )
        drops += revision_drops
        if not candidates:
            reason = ChoiceReason.NO_CANDIDATE if drops else ChoiceReason.NO_ENDPOINT
            return Choice(endpoint=None, reason=reason, policy=policy, drops=tuple(drops))
        scores = self._score(candidates, request, now)
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
            kv_blocks=compute_kv_blocks(endpoint, request),
            output_tokens=request.expected_output_tokens,
            reserved_at=now,
            session=request.session,
        )
        self.load.reserve(reservation)
        self.note_routed(endpoint.uid, request.prompt.keys, request.session, now)
        return reservation

    def first_token(self, reservation_id: int, now: float) -> bool:
        """Free the prefill part and learn the replica's speed; False when that happened before."""
        reservation = self.load.first_token(reservation_id)
        if reservation is None:
            return False
        self.speeds.observe(
            reservation.uid,
            uncached_tokens=reservation.uncached_tokens,
            reserved_at=reservation.reserved_at,
            now=now,
        )
        return True

    def release(self, reservation_id: int, now: float, usage: Usage | None = None) -> bool:
        """Free the rest, whatever ended the request; False when it is gone already. `usage` audits the index."""
        reservation = self.load.release(reservation_id)
        if reservation is None:
            return False
        if usage is not None and usage.cached_tokens is not None:
            self.index.audit(
                reservation.uid, predicted=reservation.cached_tokens, real=usage.cached_tokens, now=now
            )
        return True

    def note_routed(self, uid: str, keys: Sequence[int], session: int | None, now: float) -> None:
        """Enter a routed prompt into index and sessions; used for own and for shared decisions."""
        endpoint = self._endpoints.get(uid)
        if endpoint is None:
            return
        self.index.note_routed(endpoint, keys, now)
        if session is not None:
            self.sessions.note(session, uid)

    def replica_load(self, uid: str) -> ReplicaLoad:
        """Sums reserved on one replica."""
        return self.load.view(uid)

    def _score(self, candidates: list[EndpointView], request: RequestView, now: float) -> list[Score]:
        cached = self.index.predict(request.prompt, now)
        home = self.sessions.find(request.session)
        settings = self.settings
        if settings.policy is Policy.PREFIX:
            settings = msgspec.structs.replace(
                settings, price_of_recompute=settings.prefix_price_of_recompute
            )
        return [
            compute_score(
                endpoint,
                self.load.view(endpoint.uid),
                request,
                settings,
                cached_tokens=cached.get(endpoint.uid, 0),
                tokens_per_second=self.speeds.tokens_per_second(endpoint.uid),
                away_from_home=home is not None and home != endpoint.uid,
            )
            for endpoint in candidates
        ]

    def _forget(self, uid: str) -> None:
        self.load.drop_replica(uid)
        self.speeds.drop(uid)
        self.index.drop_replica(uid)
        self.sessions.drop_replica(uid)


def _began_anew(old: EndpointView, new: EndpointView | None) -> bool:
    """Whether the replica is gone, or its engine restarted; learning a first epoch is neither."""
    if new is None:
        return True
    return old.epoch is not None and new.epoch is not None and old.epoch != new.epoch
