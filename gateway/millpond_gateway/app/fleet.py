"""Decisions for the relay: one router per pool, kept in step with the world."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec
import xxhash

from millpond_common.contract.blockkey import KeyScope
from millpond_common.contract.openai import ApiError, ErrorCode
from millpond_gateway.app.demand import PoolDemand
from millpond_gateway.app.keys import TokenRatio, compute_keys
from millpond_gateway.app.metrics import Metrics
from millpond_gateway.proxy import headers
from millpond_gateway.proxy.dispatch import (
    Call,
    Caller,
    Decision,
    Ending,
    ModelCard,
    Outcome,
    Record,
    Target,
    Waiter,
)
from millpond_gateway.proxy.http1 import RequestHead
from millpond_gateway.proxy.models import refuse_model
from millpond_gateway.routing.records import Choice, ChoiceReason, RequestView
from millpond_gateway.routing.router import Router
from millpond_gateway.routing.settings import RoutingSettings
from millpond_gateway.world.records import PoolView, WorldSnapshot
from millpond_gateway.world.view import World

_DEFAULT_OUTPUT_TOKENS = 256


@dataclass(slots=True)
class PoolState:
    """One pool's router and what was learned about it."""

    view: PoolView
    router: Router
    demand: PoolDemand
    ratio: TokenRatio = field(default_factory=TokenRatio)


class Fleet:
    """The dispatcher of one decision process."""

    def __init__(
        self,
        world: World,
        *,
        seed: int,
        metrics: Metrics,
        pin_secret: str = "",
        expose_decisions: bool = False,
    ) -> None:
        self._world = world
        self._seed = seed
        self._metrics = metrics
        self._now = asyncio.get_running_loop().time
        self._pin_prefix = f"{pin_secret}/".encode() if pin_secret else b""
        self._expose_decisions = expose_decisions
        self._pools: dict[str, PoolState] = {}
        self._models: dict[str, tuple[PoolState, str]] = {}
        world.listen(self.on_world)

    @property
    def pools(self) -> dict[str, PoolState]:
        """State by pool name."""
        return self._pools

    # The world.

    def on_world(self, snapshot: WorldSnapshot) -> None:
        """Follow a changed view: settings, endpoints, models."""
        for name in [name for name in self._pools if name not in snapshot.pools]:
            del self._pools[name]
        for name, view in snapshot.pools.items():
            self._follow(name, view)
            self._pools[name].router.update_endpoints(snapshot.endpoints[name])
        self._models = {}
        for state in self._pools.values():
            self._models[state.view.model] = (state, "")
            for adapter in state.view.adapters:
                self._models.setdefault(adapter, (state, adapter))

    def _follow(self, name: str, view: PoolView) -> None:
        settings = RoutingSettings(policy=view.policy, price_of_recompute=view.price_of_recompute)
        state = self._pools.get(name)
        if state is None:
            seed = xxhash.xxh3_64_intdigest(name.encode(), seed=self._seed)
            self._pools[name] = PoolState(view, Router(name, settings, seed=seed), PoolDemand(self._now()))
        elif state.view != view:
            state.view = view
            state.router.set_settings(settings)

    def find_pool_name(self, model: str) -> str:
        """Pool that serves a model; empty for an unknown one."""
        found = self._models.get(model)
        return found[0].view.name if found is not None else ""

    def note_finished(self, record: Record, now: float) -> None:
        """Follow first-token times and output of a pool."""
        found = self._models.get(record.model)
        if found is None:
            return
        demand = found[0].demand
        if record.first_byte_seconds is not None and record.status == 200 and record.stream:
            demand.note_first_token(record.traffic_class, record.first_byte_seconds, now)
        if record.usage is not None:
            demand.output_tokens.add(record.usage.output_tokens, now)

    # The relay.

    def identify(self, head: RequestHead, now: float) -> Caller | ApiError:
        """Who calls; every caller is anonymous while no pool has API keys."""
        pin = head.find(headers.PIN)
        if pin is not None and self._pin_prefix and pin.startswith(self._pin_prefix):
            return Caller(pin=pin[len(self._pin_prefix) :].decode("latin-1"))
        return Caller()

    def submit(self, call: Call, tried: frozenset[str], waiter: Waiter, now: float) -> Decision | None:
        """Choose and reserve a replica."""
        found = self._models.get(call.body.model)
        if found is None:
            return self._refuse_model(call.body.model)
        state, adapter = found
        request = self._make_view(call, state, adapter)
        excluded = tried
        if call.caller.pin:
            excluded = frozenset(view.uid for view in state.router.endpoints if view.uid != call.caller.pin)
        choice = state.router.choose(request, now, excluded=excluded)
        if not tried:
            self._metrics.observe_keys(state.view.name, request.prompt.kind.value)
            state.demand.note_arrival(
                choice.score.uncached_tokens if choice.score else request.prompt.num_tokens, now
            )
        if choice.endpoint is None:
            return refuse_choice(state.view, choice, tried)
        reservation = state.router.reserve(request, choice, now)
        debug = make_debug(choice) if self._expose_decisions else ()
        return Target(choice.endpoint, state.view.name, reservation.id, request.traffic_class, debug)

    def _refuse_model(self, model: str) -> ApiError:
        if not model:
            return ApiError(ErrorCode.INVALID_VALUE, "the body names no model", "model")
        return refuse_model(model, list(self._models))

    def _make_view(self, call: Call, state: PoolState, adapter: str) -> RequestView:
        scope = KeyScope(
            model=state.view.model,
            block_tokens=state.view.block_tokens,
            adapter=adapter,
            namespace=f"{call.caller.tenant}/{call.body.cache_salt}"
            if call.body.cache_salt
            else call.caller.tenant,
        )
        limit = call.body.max_output_tokens
        expected = _DEFAULT_OUTPUT_TOKENS if limit is None else min(limit, _DEFAULT_OUTPUT_TOKENS)
        return RequestView(
            request_id=call.request_id,
            prompt=compute_keys(call.body, scope, bytes_per_token=state.ratio.bytes_per_token),
            max_output_tokens=limit,
            expected_output_tokens=expected * call.body.num_choices,
            traffic_class=choose_class(state.view, call.body.service_tier),
            tenant=call.caller.tenant,
            session=xxhash.xxh3_64_intdigest(call.session) if call.session else None,
            adapter=adapter,
        )

    def withdraw(self, call: Call, now: float) -> None:
        """Nothing is held yet."""

    def first_byte(self, target: Target, now: float) -> None:
        """Free the prefill part of the load."""
        state = self._pools.get(target.pool)
        if state is not None:
            state.router.first_token(target.reservation, now)

    def release(self, call: Call, target: Target, ending: Ending, now: float) -> None:
        """Free the rest and learn."""
        state = self._pools.get(target.pool)
        if state is None:
            return
        usage = ending.usage if ending.outcome is Outcome.COMPLETED else None
        state.router.release(target.reservation, usage)
        if usage is not None:
            state.ratio.observe(len(call.body.prompt), usage.prompt_tokens)

    def note_epoch(self, target: Target, epoch: str, now: float) -> None:
        """An answer came from another start of the engine than the one known."""
        facts = self._world.find_facts(target.endpoint.uid)
        if facts.epoch != epoch:
            self._world.put_facts(target.endpoint.uid, msgspec.structs.replace(facts, epoch=epoch))

    def find_models(self, caller: Caller) -> tuple[ModelCard, ...]:
        """Every pool's model, adapters after it."""
        cards: list[ModelCard] = []
        for name, (state, adapter) in self._models.items():
            view = state.view
            limits = [view.max_model_tokens] + [e.max_model_tokens for e in state.router.endpoints]
            known = [limit for limit in limits if limit is not None]
            cards.append(
                ModelCard(
                    id=name,
                    root=view.root or view.model,
                    parent=view.model if adapter else None,
                    max_model_tokens=min(known, default=None),
                    created=view.created_at,
                )
            )
        return tuple(cards)


def choose_class(pool: PoolView, service_tier: str) -> str:
    """The class a request asks for by OpenAI's `service_tier`, when the pool has it; else the default one."""
    if any(entry.name == service_tier for entry in pool.classes):
        return service_tier
    return pool.default_class


def refuse_choice(pool: PoolView, choice: Choice, tried: frozenset[str]) -> ApiError:
    """Why no replica took the request: 502 after failed attempts, 503 when there was none to ask."""
    if tried:
        message = f"every replica of {pool.model} that could be asked failed or was overloaded"
        return ApiError(ErrorCode.REPLICA_FAILED, message, retry_after_seconds=1)
    if choice.reason is ChoiceReason.NO_ENDPOINT:
        message = f"{pool.model} has no replica now"
    else:
        counts: dict[str, int] = {}
        for drop in choice.drops:
            counts[drop.reason.value] = counts.get(drop.reason.value, 0) + 1
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()))
        message = f"no replica of {pool.model} can take the request: {reasons}"
    return ApiError(ErrorCode.NO_REPLICA, message, retry_after_seconds=2)


def make_debug(choice: Choice) -> tuple[tuple[bytes, bytes], ...]:
    """Headers that show which replica was chosen and from which numbers."""
    assert choice.endpoint is not None
    terms = [
        f"{score.uid}={score.total_seconds:.6f}(queue={score.queue_seconds:.6f},own={score.own_seconds:.6f},"
        f"decode={score.decode_seconds:.6f},affinity={score.affinity_seconds:.6f},cached={score.cached_tokens})"
        for score in choice.scores[:16]
    ]
    text = f"{choice.policy.value}/{choice.reason.value}; " + "; ".join(terms)
    return (
        (headers.ENDPOINT, choice.endpoint.pod.encode("latin-1", "replace")),
        (headers.DECISION, text.encode("latin-1", "replace")),
    )
