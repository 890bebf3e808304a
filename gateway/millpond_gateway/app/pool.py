"""One pool inside the gateway: admission, hold queue, routing, demand and the health of its replicas."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from millpond_common.contract.openai import ApiError, ErrorCode
from millpond_gateway.app.claims import ClaimDesk, Sharing, Waiting
from millpond_gateway.app.hedges import HedgeDesk
from millpond_gateway.app.judgement import (
    estimate_usage,
    judge_attempt,
    make_class_policy,
    make_routing_settings,
)
from millpond_gateway.app.peer_book import PeerBook
from millpond_gateway.app.refusals import describe_choice, make_debug, make_refusal, refuse_choice
from millpond_gateway.app.requests import RequestMaker
from millpond_gateway.flow.admission import (
    compute_hold_seconds,
    decide_admission,
    decide_expired,
    is_saturated,
    may_start,
)
from millpond_gateway.flow.budget import Budgets
from millpond_gateway.flow.demand import DemandBook
from millpond_gateway.flow.outliers import Evidence, OutlierBook
from millpond_gateway.flow.queue import HoldQueue
from millpond_gateway.flow.records import (
    Action,
    ClassPolicy,
    FlowReason,
    FlowSettings,
    HeldRequest,
    OutlierVerdict,
    PoolView,
    TenantPolicy,
    Verdict,
)
from millpond_gateway.flow.trials import TrialBook
from millpond_gateway.proxy.dispatch import Call, Decision, Ending, Outcome, Record, Target, Waiter
from millpond_gateway.routing.records import (
    Choice,
    EndpointView,
    RequestView,
    Usage,
)
from millpond_gateway.routing.router import Router
from millpond_gateway.routing.score import Score
from millpond_gateway.world.records import PoolView as PoolSpec

_UNTRIED: Final[frozenset[str]] = frozenset()
_NO_OUTLIERS: Final = OutlierVerdict(frozenset(), frozenset(), frozenset(), capped=False)


class PoolState:
    """Decides for one pool; every method is synchronous and takes `now`."""

    def __init__(
        self,
        spec: PoolSpec,
        *,
        seed: int,
        flow: FlowSettings,
        count_keys: Callable[[str], None],
        now: float,
        explain: bool = False,
        sharing: Sharing | None = None,
    ) -> None:
        self._explain = explain
        self.spec = spec
        self._count_keys = count_keys
        self._flow = flow
        self.router = Router(spec.name, make_routing_settings(spec), seed=seed)
        self.demand = DemandBook(now)
        self.queue = HoldQueue(flow)
        self.budgets = Budgets()
        self.peers = PeerBook(self.budgets)
        self.router.set_observer(self.peers)
        self._sharing = sharing or Sharing()
        self.claims = ClaimDesk(self._sharing, self.settle_claims)
        self.outliers = OutlierBook()
        self.hedges = HedgeDesk(flow.hedge_percent)
        self.trials = TrialBook()
        self.verdict = _NO_OUTLIERS
        self.requests = RequestMaker(spec)
        self._waiting: dict[str, Waiting] = {}
        self._pumping = False
        self._cold_since: float | None = None
        """Since when requests find no replica; None while one is ready."""
        self._prompt_tokens: dict[str, int] = {}
        """Of open requests, counted or estimated."""
        self.set_spec(spec)

    def set_spec(self, spec: PoolSpec) -> None:
        """Follow a changed pool; what is open, held or learned stays."""
        self.spec = spec
        self.requests.set_spec(spec)
        self.router.set_settings(make_routing_settings(spec))
        self._flow = msgspec.structs.replace(self._flow, cold_start_hold_seconds=spec.cold_start_hold_seconds)
        tenants = [
            TenantPolicy(
                name=entry.name,
                weight=entry.weight,
                max_concurrency=entry.max_concurrency,
                tokens_per_minute=entry.tokens_per_minute,
            )
            for entry in spec.tenants
        ]
        self._classes = {entry.name: make_class_policy(entry) for entry in spec.classes}
        self.queue.set_policies(self._classes.values(), tenants)
        self.budgets.set_policies(tenants)

    def set_endpoints(self, endpoints: tuple[EndpointView, ...], now: float) -> None:
        """Follow changed replicas; held requests may have found one."""
        self.router.update_endpoints(endpoints)
        self.requests.set_endpoints(endpoints)
        self.outliers.keep_only(endpoint.uid for endpoint in endpoints)
        self.trials.set_endpoints({endpoint.pod: endpoint.revision for endpoint in endpoints})
        if any(view.ready for view in endpoints):
            self._cold_since = None
        self.pump(now)

    def close(self, now: float) -> None:
        """The pool is gone: nothing comes any more for what waits."""
        self.set_endpoints((), now)
        gone = ApiError(ErrorCode.MODEL_NOT_FOUND, f"{self.spec.model} is not served any more", "model")
        waiters = [waiting.waiter for waiting in self._waiting.values()]
        for waiter in (*waiters, *(claim.waiter for claim in self.claims.take_all())):
            waiter(gone)

    # Requests.

    def submit(
        self, call: Call, adapter: str, tried: frozenset[str], waiter: Waiter, now: float
    ) -> Decision | None:
        """Admit, hold or shed; a repeated attempt was admitted before and is not judged again."""
        request = self.requests.make(call, adapter)
        excluded = tried
        if call.caller.pin:
            excluded = frozenset(view.uid for view in self.router.endpoints if view.uid != call.caller.pin)
        choice = self.router.choose(request, now, excluded=excluded)
        if tried or call.caller.pin:
            return self._bind(request, choice, tried, now)
        self._count_keys(request.prompt.kind)
        self.hedges.budget.note_request()
        self.demand.arrive(choice.score.uncached_tokens if choice.score else request.prompt.num_tokens, now)
        self._prompt_tokens[call.id] = request.prompt.num_tokens
        budget = self._reserve_budget(call, request, now)
        if budget.action is Action.SHED:
            return make_refusal(self.spec, budget)
        if budget.action is Action.HOLD:
            self.claims.add(call, adapter, request, waiter, now)
            self._tell_holds()
            return None
        return self._admit(call, request, choice, waiter, now)

    def settle_claims(self) -> None:
        """Answer the claims that every gateway knows by now."""
        now = self._sharing.now()
        while (claim := self.claims.take_due(now)) is not None:
            budget = self._reserve_budget(claim.call, claim.request, now, claimed_as=self._sharing.origin)
            if budget.action is Action.SHED:
                claim.waiter(make_refusal(self.spec, budget))
                continue
            choice = self.router.choose(claim.request, now)
            decision = self._admit(claim.call, claim.request, choice, claim.waiter, now)
            if decision is not None:
                claim.waiter(decision)
        self._tell_holds()

    def _admit(
        self, call: Call, request: RequestView, choice: Choice, waiter: Waiter, now: float
    ) -> Decision | None:
        """Bind, hold or shed what its tenant's limits allow."""
        view, policy = self._view(choice, request, now), self._find_class(request.traffic_class)
        verdict = decide_admission(view, policy, self._flow)
        if verdict.action is Action.ADMIT:
            return self._bind(request, choice, _UNTRIED, now)
        if verdict.action is Action.SHED:
            return self._shed(verdict, choice)
        return self._hold(Waiting(call, request, _UNTRIED, waiter), choice, verdict.reason, now)

    def _bind(self, request: RequestView, choice: Choice, tried: frozenset[str], now: float) -> Decision:
        if choice.endpoint is None:
            return refuse_choice(self.spec, choice, tried)
        reservation = self.router.reserve(request, choice, now)
        decision = describe_choice(choice) if self._explain else ""
        return Target(
            choice.endpoint,
            self.spec.name,
            reservation.id,
            request.traffic_class,
            self._find_class(request.traffic_class).ttft_seconds,
            reserved_at=now,
            predicted_seconds=choice.score.wait_seconds if choice.score is not None else 0.0,
            cached_tokens=reservation.cached_tokens,
            prompt_tokens=request.prompt.num_tokens,
            decision=decision,
            debug=make_debug(choice, decision) if decision else (),
        )

    # Second attempts.

    def is_late(self, call: Call, target: Target, now: float) -> bool:
        """Whether a second attempt would be worth it, should the engine not have begun the first."""
        return not call.caller.pin and len(self.router.endpoints) > 1 and self.hedges.is_late(target, now)

    def hedge(
        self, call: Call, adapter: str, target: Target, tried: frozenset[str], now: float
    ) -> Target | None:
        """Reserve a second replica; None for no. The tenant's budget holds the request already."""
        request = self.requests.make(call, adapter)
        choice = self.router.choose(request, now, excluded=tried)
        view = self._view(choice, request, now)
        saturated = is_saturated(view, self._find_class(request.traffic_class), self._flow)
        if not self.hedges.decide(target, now, saturated=saturated, num_other_candidates=len(choice.scores)):
            return None
        second = self._bind(request, choice, tried, now)
        return second if isinstance(second, Target) else None

    def _reserve_budget(
        self, call: Call, request: RequestView, now: float, *, claimed_as: str | None = None
    ) -> Verdict:
        tenant, num = call.caller.tenant, self._sharing.count()
        return self.budgets.reserve(
            call.id, tenant, request.budget_tokens, now, num_sharers=num, claimed_as=claimed_as
        )

    def _hold(self, waiting: Waiting, choice: Choice, reason: FlowReason, now: float) -> Decision | None:
        request = waiting.request
        held = HeldRequest(
            request_id=waiting.call.id,
            tenant=request.tenant,
            traffic_class=request.traffic_class,
            uncached_tokens=choice.score.uncached_tokens if choice.score else request.prompt.num_tokens,
            num_bytes=waiting.call.body.num_bytes,
            arrived_at=now,
            expires_at=now + compute_hold_seconds(reason, self._flow),
            budget_tokens=request.budget_tokens,
        )
        full = self.queue.add(held)
        if full is not None:
            hint = max(1, math.ceil(self.queue.num_tokens / max(1.0, self._compute_speed())))
            return make_refusal(self.spec, Verdict(Action.SHED, full, min(120, hint)))
        self._waiting[waiting.call.id] = waiting
        self._tell_holds()
        return None

    def first_byte(self, target: Target, now: float, *, stream: bool) -> None:
        """Free the prefill part of the load; only a stream's first byte tells when its first token came."""
        self.router.first_token(target.reservation, now)
        if stream:
            self.hedges.note_first_token(target, now)
        self.pump(now)

    def withdraw(self, call: Call, now: float) -> None:
        """A held request's client left."""
        self.queue.remove(call.id)
        self.claims.remove(call.id)
        self._waiting.pop(call.id, None)
        self._tell_holds()

    def pump(self, now: float) -> None:
        """Bind held requests while the fleet has room for the one whose turn it is."""
        if self._pumping or not len(self.queue):
            return
        self._pumping = True  # a waiter may fail at once and come back here
        try:
            while self._pump_one(now):
                pass
        finally:
            self._pumping = False
            self._tell_holds()

    def _pump_one(self, now: float) -> bool:
        held = self.queue.peek(now)
        if held is None:
            return False
        waiting = self._waiting[held.request_id]
        choice = self.router.choose(waiting.request, now, excluded=waiting.tried)
        view = self._view(choice, waiting.request, now)
        if not may_start(view, self._find_class(held.traffic_class), self._flow):
            return False
        self.queue.take(held.request_id, now)
        del self._waiting[held.request_id]
        waiting.waiter(self._bind(waiting.request, choice, waiting.tried, now))
        return True

    def expire(self, now: float) -> None:
        """Answer what was held too long."""
        for held in self.queue.expire(now):
            waiting = self._waiting.pop(held.request_id)
            choice = self.router.choose(waiting.request, now, excluded=waiting.tried)
            view = self._view(choice, waiting.request, now)
            verdict = decide_expired(view, self._find_class(held.traffic_class), self._flow)
            waiting.waiter(self._shed(verdict, choice))
        self._tell_holds()

    # Attempts.

    def release(self, call: Call, target: Target, ending: Ending, now: float) -> None:
        """Free a reservation, audit the index, judge the replica."""
        usage = ending.usage if ending.outcome is Outcome.COMPLETED else None
        taken = usage or estimate_usage(ending, self._prompt_tokens.get(call.id, 0))
        used_tokens = taken.prompt_tokens + taken.output_tokens if taken is not None else 0
        self.router.release(target.reservation, usage, used_tokens=used_tokens)
        evidence = judge_attempt(ending)
        if evidence is not None:
            client = call.caller.tenant or call.client
            if call.caller.pin:
                self.outliers.note_probe(target.endpoint.uid, ok=evidence is Evidence.SUCCESS)
            else:
                self.outliers.note(target.endpoint.uid, evidence, client=client, now=now)
                self.trials.note_attempt(target.endpoint.pod, evidence)
        self.pump(now)

    def finish(self, call: Call, record: Record, now: float) -> Usage | None:
        """The request is over, however many attempts it took; what it used, counted or estimated."""
        usage = record.usage
        prompt_tokens = self._prompt_tokens.pop(call.id, 0)
        if usage is not None:
            self.requests.learn(call, usage.prompt_tokens)
        else:
            usage = estimate_usage(record, prompt_tokens)
        self.budgets.settle(call.id, usage.prompt_tokens + usage.output_tokens if usage else 0, now)
        if usage is not None:
            self.demand.output(usage.output_tokens, now)
        if record.first_byte_seconds is not None and record.status == 200 and call.body.stream:
            self.demand.first_token(record.traffic_class, record.first_byte_seconds, now)
            self.trials.note_first_token(record.endpoint, record.first_byte_seconds)
        return usage

    def _tell_holds(self) -> None:
        make = partial(self.claims.make_holds, self.queue)
        self.router.note_held(len(self.queue), self.queue.num_tokens, make, version=self.claims.version)

    @property
    def num_held(self) -> int:
        """Requests held by all gateways."""
        return len(self.queue) + self.peers.num_held

    def judge(self, now: float) -> None:
        """Eject failing replicas, within the cap."""
        ready = [view.uid for view in self.router.endpoints if view.ready and not view.cordoned]
        verdict = self.outliers.decide(ready, now)
        if verdict.ejected != self.verdict.ejected:
            self.router.set_ejected(verdict.ejected)
        self.verdict = verdict

    # Views.

    def _view(self, choice: Choice, request: RequestView, now: float) -> PoolView:
        best: Score | None = None
        tokens_per_second = 0.0
        for score in choice.scores:
            tokens_per_second += score.tokens_per_second
            if best is None or score.queue_seconds < best.queue_seconds:
                best = score
        return PoolView(
            num_endpoints=self.router.num_endpoints,
            num_routable=len(choice.scores),
            queue_seconds=best.queue_seconds if best is not None else None,
            own_seconds=best.uncached_tokens / best.tokens_per_second if best is not None else 0.0,
            tokens_per_second=tokens_per_second,
            starting=self.spec.cold_start_hold_seconds > 0 or self.spec.may_be_zero,
            start_seconds_left=self._find_start_left(now) if not choice.scores else None,
            num_held=self.num_held,
            held_tokens=self.queue.num_tokens + self.peers.held_tokens,
            gated=self.queue.is_gated(self._find_class(request.traffic_class)),
        )

    def _find_start_left(self, now: float) -> float | None:
        """Rest of the measured start, counted from the first request that found no replica."""
        if self._cold_since is None:
            self._cold_since = now
        if self.spec.start_seconds is None:
            return None
        return max(self.spec.start_seconds - (now - self._cold_since), 0.0)

    def _find_class(self, name: str) -> ClassPolicy:
        return self.queue.find_class(name)

    def _compute_speed(self) -> float:
        return sum(
            self.router.speeds.tokens_per_second(view.uid) for view in self.router.endpoints if view.ready
        )

    def _shed(self, verdict: Verdict, choice: Choice) -> ApiError:
        if verdict.reason is FlowReason.NO_REPLICA and choice.endpoint is None:
            return refuse_choice(self.spec, choice, frozenset())
        return make_refusal(self.spec, verdict)
