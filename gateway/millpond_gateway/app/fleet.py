"""Decisions for the relay: one state per pool, kept in step with the world."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec
import xxhash

from millpond_common.contract.openai import ApiError, ErrorCode
from millpond_gateway.app.claims import Sharing
from millpond_gateway.app.metrics import Metrics
from millpond_gateway.app.pool import PoolState
from millpond_gateway.app.tenants import KeyRing, find_tenant, needs_key
from millpond_gateway.flow.records import FlowSettings
from millpond_gateway.proxy import headers
from millpond_gateway.proxy.dispatch import Call, Caller, Decision, Ending, ModelCard, Record, Target, Waiter
from millpond_gateway.proxy.models import refuse_model
from millpond_gateway.proxy.records import RequestHead
from millpond_gateway.routing.records import Usage
from millpond_gateway.routing.router import Router
from millpond_gateway.world.records import Replica, WorldSnapshot
from millpond_gateway.world.view import World


class Fleet:
    """The dispatcher of one decision process."""

    def __init__(
        self,
        world: World,
        *,
        seed: int,
        metrics: Metrics,
        flow: FlowSettings | None = None,
        pin_secret: str = "",
        explain: bool = False,
    ) -> None:
        self._world = world
        self._seed = seed
        self._metrics = metrics
        self._flow = flow or FlowSettings()
        self._now = asyncio.get_running_loop().time
        self._pin_prefix = f"{pin_secret}/".encode() if pin_secret else b""
        self._explain = explain
        self.keys = KeyRing()
        self.pools: dict[str, PoolState] = {}
        """State by pool name."""
        self._models: dict[str, tuple[PoolState, str]] = {}
        self._open: dict[str, PoolState] = {}
        """State that took each open request: models change their pools meanwhile, and pools their models."""
        self._all_need_keys = False
        self._sharing = Sharing()
        self._sharing.now = self._now
        self._attach: Callable[[Router], None] | None = None
        self._detach: Callable[[str], None] | None = None
        world.listen(self.on_world)

    def share(
        self,
        attach: Callable[[Router], None],
        detach: Callable[[str], None],
        *,
        origin: str,
        count: Callable[[], int],
    ) -> None:
        """Share every pool's decisions with other gateways from now on; `count` tells how many, this one included."""
        self._attach, self._detach = attach, detach
        self._sharing.origin, self._sharing.count = origin, count
        self._sharing.call_later = asyncio.get_running_loop().call_later
        for state in self.pools.values():
            attach(state.router)

    # The world.

    def on_world(self, snapshot: WorldSnapshot) -> None:
        """Follow a changed view: settings, endpoints, models."""
        now = self._now()
        for name in [name for name in self.pools if name not in snapshot.pools]:
            self.pools.pop(name).close(now)
            if self._detach is not None:
                self._detach(name)
        for name, spec in snapshot.pools.items():
            state = self.pools.get(name)
            if state is None:
                seed = xxhash.xxh3_64_intdigest(name.encode(), seed=self._seed)
                count = partial(self._metrics.observe_keys, name)
                state = PoolState(
                    spec,
                    seed=seed,
                    flow=self._flow,
                    count_keys=count,
                    now=now,
                    explain=self._explain,
                    sharing=self._sharing,
                )
                self.pools[name] = state
                if self._attach is not None:
                    self._attach(state.router)
            elif state.spec != spec:
                state.set_spec(spec)
            endpoints = snapshot.endpoints[name]
            if endpoints != state.router.endpoints:
                state.set_endpoints(endpoints, now)
        self._models = self._make_models()
        self.keys.follow(snapshot.pools.values())
        self._all_need_keys = bool(self.pools) and all(map(needs_key, snapshot.pools.values()))

    def _make_models(self) -> dict[str, tuple[PoolState, str]]:
        """Pool and adapter by what clients write; a model's own name wins over an adapter's, an older pool over a younger.

        Every gateway of the namespace says the same, and so does the operator in the younger pool's status.
        """
        states = sorted(self.pools.values(), key=lambda state: state.spec.seniority)
        models: dict[str, tuple[PoolState, str]] = {}
        for state in states:
            models.setdefault(state.spec.model, (state, ""))
        for state in states:
            for adapter in state.spec.adapters:
                models.setdefault(adapter, (state, adapter))
        return models

    def find_replica(self, uid: str) -> Replica | None:
        """A replica as it was discovered."""
        return self._world.find_replica(uid)

    def find_pool_name(self, model: str) -> str:
        """Pool that serves a model; empty for an unknown one."""
        found = self._models.get(model)
        return found[0].spec.name if found is not None else ""

    def tick(self, now: float) -> None:
        """What time alone changes: holds that end, replicas that fail, queues that may move."""
        for state in self.pools.values():
            state.expire(now)
            state.judge(now)
            state.pump(now)

    # The relay.

    def identify(self, head: RequestHead, now: float) -> Caller | ApiError:
        """Who calls, by API key; a readiness probe by the secret of this process."""
        pin = head.index.get(headers.PIN)
        if pin is not None and self._pin_prefix and pin.startswith(self._pin_prefix):
            return Caller(pin=pin[len(self._pin_prefix) :].decode("latin-1"))
        caller = self.keys.identify(head.index.get(b"authorization"))
        if caller.refusal is not None and self._all_need_keys:
            return caller.refusal
        return caller

    def place(self, caller: Caller, model: str) -> Caller:
        """The caller as the tenant that its key makes it in this pool."""
        found = self._models.get(model) if caller.secrets else None
        tenant = find_tenant(found[0].spec, caller) if found is not None else caller.tenant
        if isinstance(tenant, ApiError) or tenant == caller.tenant:
            return caller
        return msgspec.structs.replace(caller, tenant=tenant)

    def submit(self, call: Call, tried: frozenset[str], waiter: Waiter, now: float) -> Decision | None:
        """Choose and reserve a replica, hold the request, or refuse it."""
        found = self._models.get(call.body.model)
        if found is None:
            if not call.body.model:
                return ApiError(ErrorCode.INVALID_VALUE, "the body names no model", "model")
            if not self._world.snapshot.synced:
                message = "the gateway has just started and does not know every pool yet"
                return ApiError(ErrorCode.NO_REPLICA, message, retry_after_seconds=1)
            return refuse_model(call.body.model, [card.id for card in self.find_models(call.caller)])
        state, adapter = found
        if not call.caller.pin:
            tenant = find_tenant(state.spec, call.caller)
            if isinstance(tenant, ApiError):
                return tenant
        # Another attempt stays where the first one is in the books.
        state = self._open.setdefault(call.id, state)
        return state.submit(call, adapter, tried, waiter, now)

    def withdraw(self, call: Call, now: float) -> None:
        """A held request's client left."""
        state = self._open.get(call.id)
        if state is not None:
            state.withdraw(call, now)

    def first_byte(self, call: Call, target: Target, now: float) -> None:
        """Free the prefill part of the load."""
        state = self.pools.get(target.pool)
        if state is not None:
            state.first_byte(target, now, stream=call.body.stream)

    def is_late(self, call: Call, target: Target, now: float) -> bool:
        """Whether a second attempt would be worth it."""
        state = self.pools.get(target.pool)
        return state is not None and state.is_late(call, target, now)

    def hedge(self, call: Call, target: Target, tried: frozenset[str], now: float) -> Target | None:
        """Choose and reserve a second replica; None for no."""
        found = self._models.get(call.body.model)
        return found[0].hedge(call, found[1], target, tried, now) if found is not None else None

    def release(self, call: Call, target: Target, ending: Ending, now: float) -> None:
        """Free the rest and learn."""
        state = self.pools.get(target.pool)
        if state is not None:
            state.release(call, target, ending, now)

    def finish(self, call: Call, record: Record, now: float) -> Usage | None:
        """Settle what the request had reserved at its tenant; follow demand."""
        state = self._open.pop(call.id, None)
        return state.finish(call, record, now) if state is not None else None

    def note_epoch(self, target: Target, epoch: str, now: float) -> None:
        """An answer came from another start of the engine than the one known."""
        facts = self._world.find_facts(target.endpoint.uid)
        if facts.epoch != epoch:
            self._world.put_facts(target.endpoint.uid, msgspec.structs.replace(facts, epoch=epoch))

    def find_models(self, caller: Caller) -> tuple[ModelCard, ...]:
        """Models the caller may use, adapters after their model."""
        cards: list[ModelCard] = []
        for name, (state, adapter) in self._models.items():
            spec = state.spec
            if isinstance(find_tenant(spec, caller), ApiError):
                continue
            limits = [
                spec.max_model_tokens,
                *(endpoint.max_model_tokens for endpoint in state.router.endpoints),
            ]
            cards.append(
                ModelCard(
                    id=name,
                    root=spec.root or spec.model,
                    parent=spec.model if adapter else None,
                    max_model_tokens=min((limit for limit in limits if limit is not None), default=None),
                    created=spec.created_at,
                )
            )
        return tuple(cards)
