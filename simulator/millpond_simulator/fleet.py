"""A fleet in virtual time: gateways with the real router and the real shared decisions over fake engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

import msgspec

from millpond_gateway.routing.records import EndpointView, KeyKind, PromptKeys, RequestView, Usage
from millpond_gateway.routing.router import Router
from millpond_gateway.routing.settings import RoutingSettings
from millpond_gateway.routing.shared import Outgoing, SharedDecisions
from millpond_simulator.clock import Clock
from millpond_simulator.engine import EngineModel, FakeEngine, Job
from millpond_simulator.rules import POLICIES, Placer, Rule
from millpond_simulator.trace import TraceRequest

POOL = "simulated"
_FLUSH_SECONDS = 0.010
_HEARTBEAT_SECONDS = 1.0


class Sharing(StrEnum):
    """How gateways know of each other's decisions."""

    SHARED = "Shared"
    ISOLATED = "Isolated"


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated fleet."""

    engines: tuple[EngineModel, ...] = (EngineModel(),) * 8
    num_gateways: int = 1
    rule: Rule = Rule.AUTO
    routing: RoutingSettings = RoutingSettings()
    sharing: Sharing = Sharing.SHARED
    network_seconds: float = 0.020
    """One way between gateways; batching adds 10 ms."""
    restart_at: float | None = None
    """When the first replica begins anew with an empty cache."""


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """What one request saw."""

    arrived_at: float
    ttft_seconds: float
    ended_at: float
    num_tokens: int
    cached_tokens: int
    predicted_tokens: int
    output_tokens: int
    uid: str


class Gateway:
    """One gateway process of the fleet."""

    def __init__(self, fleet: Fleet, number: int, seed: int) -> None:
        self._fleet = fleet
        settings = fleet.settings
        routing = settings.routing
        if settings.rule in POLICIES:
            routing = msgspec.structs.replace(routing, policy=POLICIES[settings.rule])
        self.router = Router(POOL, routing, seed=seed * 1000 + number)
        self.router.update_endpoints(fleet.endpoints)
        self._placer = Placer(settings.rule, self.router, seed=seed * 1000 + 500 + number)
        self.shared = SharedDecisions(origin=f"g{number}", epoch=seed * 1000 + number)
        self._shares = settings.sharing is Sharing.SHARED and settings.num_gateways > 1
        self._flush_due = False
        self.num_sent_bytes = 0
        if self._shares:
            self.shared.attach(self.router)

    def handle(self, request: RequestView, output_tokens: int) -> None:
        """Choose, reserve, send; free at first token and end."""
        clock = self._fleet.clock
        arrived_at = clock.now
        choice = self._placer.choose(request, arrived_at)
        reservation = self.router.reserve(request, choice, arrived_at)
        self._share_soon()
        first_at = 0.0

        def on_first_token(_job: Job) -> None:
            nonlocal first_at
            first_at = clock.now
            self.router.first_token(reservation.id, clock.now)
            self._share_soon()

        def on_end(job: Job) -> None:
            usage = Usage(
                prompt_tokens=job.num_tokens, cached_tokens=job.cached_tokens, output_tokens=output_tokens
            )
            self.router.release(reservation.id, None if job.failed else usage)
            self._share_soon()
            if not job.failed:
                self._fleet.outcomes.append(
                    Outcome(
                        arrived_at,
                        first_at - arrived_at,
                        clock.now,
                        job.num_tokens,
                        job.cached_tokens,
                        reservation.cached_tokens,
                        output_tokens,
                        reservation.uid,
                    )
                )

        self._fleet.engines[reservation.uid].submit(
            Job(
                keys=request.prompt.keys,
                num_tokens=request.prompt.num_tokens,
                output_tokens=output_tokens,
                on_first_token=on_first_token,
                on_end=on_end,
            )
        )

    def heartbeat(self) -> None:
        """Send a digest, and expire silent peers."""
        if self._shares:
            self._broadcast(self.shared.heartbeat())
            self.shared.expire(self._fleet.clock.now)

    def receive(self, data: bytes) -> None:
        """Take a peer's message and answer it."""
        for outgoing in self.shared.receive(data, self._fleet.clock.now):
            self._fleet.send(outgoing)

    def _share_soon(self) -> None:
        if self._shares and not self._flush_due:
            self._flush_due = True
            self._fleet.clock.after(_FLUSH_SECONDS, self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        self._broadcast(self.shared.flush())

    def _broadcast(self, messages: Sequence[bytes]) -> None:
        for data in messages:
            for peer in self._fleet.gateways:
                if peer is not self:
                    self.num_sent_bytes += len(data)
                    self._fleet.send(Outgoing(peer.shared.origin, data))


class Fleet:
    """Engines, gateways and the network between them."""

    def __init__(self, settings: FleetSettings, *, seed: int) -> None:
        self.settings = settings
        self.clock = Clock()
        self.outcomes: list[Outcome] = []
        self.endpoints = tuple(
            EndpointView(
                uid=f"replica-{number}",
                pod=f"replica-{number}",
                address="",
                epoch="0",
                ready=True,
                block_tokens=model.block_tokens,
                num_blocks=model.num_blocks,
            )
            for number, model in enumerate(settings.engines)
        )
        self.engines = {
            endpoint.uid: FakeEngine(endpoint.uid, model, self.clock)
            for endpoint, model in zip(self.endpoints, settings.engines, strict=True)
        }
        self.gateways = [Gateway(self, number, seed) for number in range(settings.num_gateways)]
        self._by_origin = {gateway.shared.origin: gateway for gateway in self.gateways}

    def restart(self, uid: str) -> None:
        """Let an engine begin anew with an empty cache; its open requests are lost, and every gateway hears of it."""
        self.engines[uid].restart()
        for gateway in self.gateways:
            gateway.router.note_epoch(uid, f"{self.clock.now:g}")

    def send(self, outgoing: Outgoing) -> None:
        """Deliver a message after the network's delay."""
        receiver = self._by_origin[outgoing.origin]
        self.clock.after(self.settings.network_seconds, lambda: receiver.receive(outgoing.data))

    def replay(self, requests: Sequence[TraceRequest]) -> list[Outcome]:
        """Run a trace to its end; request n arrives at gateway n modulo their number."""
        for number, request in enumerate(requests):
            gateway = self.gateways[number % len(self.gateways)]
            self.clock.at(request.timestamp / 1000.0, self._make_arrival(gateway, number, request))
        if self.settings.restart_at is not None:
            self.clock.at(self.settings.restart_at, lambda: self.restart(self.endpoints[0].uid))
        end = requests[-1].timestamp / 1000.0 if requests else 0.0
        for second in range(1, int(end) + 2):
            self.clock.at(second * _HEARTBEAT_SECONDS, self._heartbeat)
        self.clock.run()
        return self.outcomes

    def _heartbeat(self) -> None:
        for gateway in self.gateways:
            gateway.heartbeat()

    @staticmethod
    def _make_arrival(gateway: Gateway, number: int, request: TraceRequest) -> Callable[[], None]:
        view = make_request_view(request, f"r{number}")
        return lambda: gateway.handle(view, request.output_length)


def make_request_view(request: TraceRequest, request_id: str) -> RequestView:
    """A trace's request as routing sees it; the caller's token limit stands for the output it will have."""
    keys = request.block_keys
    return RequestView(
        request_id=request_id,
        prompt=PromptKeys(
            keys=keys,
            tokens_per_key=512.0,
            num_tokens=request.input_length,
            kind=KeyKind.TOKENS if keys else KeyKind.NONE,
        ),
        expected_output_tokens=256,
    )
