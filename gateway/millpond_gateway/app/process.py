"""The life of one gateway process: start, serve, drain, exit."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import signal
import socket
import sys
from collections.abc import Coroutine
from typing import Any, cast

import structlog

from millpond_common.contract.gateway_report import ProbeRequest, ProbeResult
from millpond_gateway.app.access import AccessLog
from millpond_gateway.app.admin import AdminActions, AdminAnswer, AdminServer
from millpond_gateway.app.events import EventReaders
from millpond_gateway.app.fleet import Fleet
from millpond_gateway.app.form import find_form
from millpond_gateway.app.memory import Trimmer, find_allocator
from millpond_gateway.app.metrics import Metrics
from millpond_gateway.app.observer import RequestObserver
from millpond_gateway.app.options import Options
from millpond_gateway.app.peer_keys import find_peer_keys
from millpond_gateway.app.peers import PeerMesh
from millpond_gateway.app.plan import WorkerPlan
from millpond_gateway.app.poll import StatePoller
from millpond_gateway.app.probe import probe
from millpond_gateway.app.publish import Publisher
from millpond_gateway.app.sockets import find_local_host, listen, listen_locally, warn_about_descriptors
from millpond_gateway.app.traces import Tracing
from millpond_gateway.app.vitals import Vitals
from millpond_gateway.proxy.client import ClientConnection
from millpond_gateway.proxy.relay import Relay
from millpond_gateway.routing.records import Policy
from millpond_gateway.routing.shared import SharedDecisions
from millpond_gateway.world.kubernetes import PODS, POOLS, PeerStore, watch_namespace
from millpond_gateway.world.static import parse_static
from millpond_gateway.world.view import World

_log = structlog.get_logger("gateway")
_BACKLOG = 4096
_FLUSH_SECONDS = 2.0
"""For the last error events to leave."""
_STATIC = "static"
_VIEW_SECONDS = 10.0
_LOOK_SECONDS = 0.02
_PROBE_SECONDS = 5.0
_MAX_PROBED = 4096


class GatewayProcess:
    """Everything of one process."""

    def __init__(
        self, options: Options, plan: WorkerPlan | None = None, *, tracing: Tracing | None = None
    ) -> None:
        self._tracing = tracing
        self._options = options
        self._plan = plan
        self._siblings: frozenset[str] = plan.siblings if plan is not None else frozenset()
        self._epoch = secrets.token_hex(8)
        self._pin_secret = plan.pin_secret if plan is not None else secrets.token_hex(16)
        self._metrics = Metrics()
        self._vitals = Vitals()
        self.world = World()
        self.fleet = Fleet(
            self.world,
            seed=options.seed if options.seed is not None else secrets.randbits(64),
            pin_secret=self._pin_secret,
            explain=options.relay.expose_decisions or tracing is not None,
            metrics=self._metrics,
            flow=options.flow,
        )
        self._access = AccessLog(sys.stdout.buffer, self._metrics) if options.access_log else None
        self._stop = asyncio.Event()
        self.mesh = self._make_mesh(options)
        observer = RequestObserver(self.fleet, self._metrics, self._access, tracing)
        self.relay = Relay(options.relay, self.fleet, observer)
        self._poller = StatePoller(self.world, self.relay.connections, interval_seconds=options.poll_seconds)
        self._publisher = Publisher(
            self.fleet,
            self.world,
            self.relay,
            mesh=self.mesh,
            metrics=self._metrics,
            vitals=self._vitals,
            gateway=_find_pod_name(),
            epoch=self._epoch,
            for_supervisor=plan is not None,
        )
        self.port = self.admin_port = 0
        """Ports bound, once started."""
        self._admin: AdminServer | None = None
        self._server: asyncio.Server | None = None
        self._trimmer = Trimmer()
        self._probes: set[asyncio.Task[ProbeResult]] = set()
        self._probed_at: dict[str, float] = {}
        self._work: list[asyncio.Task[None]] = []

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT, then drain; the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        if self._plan is not None:
            loop.add_reader(sys.stdin.fileno(), self._on_supervisor_gone)
        await self.start()
        try:
            await self._wait()
            await self.drain()
        finally:
            failed = await self.stop()
        return 1 if failed else 0

    async def _wait_for_view(self) -> None:
        """Let a worker take no connection from the others before it knows what they know; for a bounded time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_VIEW_SECONDS):
                while not self._has_view() and not self._stop.is_set():  # noqa: ASYNC110 - parts that tell nobody
                    await asyncio.sleep(_LOOK_SECONDS)

    def _has_view(self) -> bool:
        peers = self.mesh.shared.num_synced_peers() if self.mesh is not None else 0
        return self.world.snapshot.synced and self._poller.has_heard_all() and peers >= len(self._siblings)

    def _on_supervisor_gone(self) -> None:
        """Its end of the pipe closed: nobody would restart or stop this worker any more."""
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        _log.error("the supervisor is gone: draining")
        self._stop.set()

    async def start(self) -> None:
        """Open both ports and begin to follow the world."""
        options = self._options
        loop = asyncio.get_running_loop()
        self.relay.max_sockets = warn_about_descriptors(options.relay.max_connections)
        plan = self._plan
        data_socket = listen(options.host, plan.port if plan else options.port, reuse_port=plan is not None)
        self.port = data_socket.getsockname()[1]
        admin = listen_locally(plan.admin_path) if plan else listen(options.host, options.admin_port)
        self._admin = AdminServer(admin, self._make_actions())
        self.admin_port = 0 if plan else admin.getsockname()[1]
        self._admin.start()
        self._work = [loop.create_task(step) for step in self._make_work()]
        if plan is not None:
            await self._wait_for_view()
        self._server = await loop.create_server(
            lambda: cast("asyncio.Protocol", ClientConnection(self.relay)), sock=data_socket, backlog=_BACKLOG
        )
        self._vitals.listening = True
        _log.info(
            "serving",
            form=find_form(),
            allocator=find_allocator(),
            host=options.host,
            port=self.port,
            admin_port=self.admin_port,
            static=options.static,
        )

    async def drain(self) -> None:
        """Unready first, then no new connections, then wait for open requests until the grace is over."""
        options = self._options
        self._vitals.draining = True
        self.relay.draining = True
        _log.info("draining", open_requests=self.relay.num_requests, grace_seconds=options.grace_seconds)
        await self._accept_latecomers(options.drain_delay_seconds)
        if self._server is not None:
            self._server.close()
        self.relay.begin_drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(options.grace_seconds):
                await self.relay.deserted.wait()
        _log.info("drained", cut_requests=self.relay.num_requests)

    async def _accept_latecomers(self, delay: float) -> None:
        """Accept until no connection came for `delay` seconds, at most five times as long.

        Nobody tells a leaving pod when the last node has stopped sending it connections; a fixed wait either loses
        some on a busy cluster or holds up every rollout.
        """
        now = self.relay.now
        started = now()
        while (left := min(max(self.relay.last_client_at, started) + delay, started + 5 * delay) - now()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(left)

    async def stop(self) -> bool:
        """End everything at once; True when a part that must never end had failed."""
        if self._server is not None:
            self._server.close()
        failed = any(task.done() and not task.cancelled() and task.exception() for task in self._work)
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        self.relay.shut_down()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_SECONDS):
                await self.relay.deserted.wait()
        admin, self._admin = self._admin, None
        if admin is not None:
            admin.stop()
        if self._access is not None:
            self._access.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.stop)
        return failed

    async def _wait(self) -> None:
        """Until asked to stop, or until something that must never end has ended."""
        stopping = asyncio.get_running_loop().create_task(self._stop.wait())
        done, _ = await asyncio.wait([stopping, *self._work], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        for task in done:
            if task is not stopping and task.exception() is not None:
                _log.error("a part of the gateway ended", exc_info=task.exception())

    def _make_mesh(self, options: Options) -> PeerMesh | None:
        """Shared decisions, wherever there can be other gateways."""
        if options.static and not options.peers and not self._siblings:
            return None
        origin = f"{_find_pod_name()}/{self._epoch}"
        shared = SharedDecisions(origin=origin, epoch=int(self._epoch, 16))
        clock = asyncio.get_running_loop().time
        mesh = PeerMesh(
            shared,
            clock,
            keys=find_peer_keys(options, self._plan, clock),
            any_host=options.any_peer,
            on_refused=lambda reason: self._metrics.peers_refused.labels(reason).inc(),
        )
        self.fleet.share(mesh.attach, mesh.detach, origin=origin, count=lambda: 1 + shared.num_live_peers())
        return mesh

    def _make_work(self) -> list[Coroutine[Any, Any, None]]:
        options = self._options
        poller = self._poller
        work: list[Coroutine[Any, Any, None]] = [self._tick(), poller.run()]
        if self.mesh is not None:
            plan = self._plan
            port = plan.peer_port if plan else options.peer_port
            work.append(self.mesh.run(options.host, port, reuse_port=plan is not None))
            self._set_peers(frozenset(options.peers))
        if options.static:
            self._load_static()
            if options.kv_events and any(replica.events for replica in self.world.replicas):
                work.append(EventReaders(self.fleet, asyncio.get_running_loop().time).run())
        else:
            self.world.expect(POOLS)
            self.world.expect(PODS)
            self._vitals.max_view_age_seconds = 2 * options.watch.resync_seconds
            clock = asyncio.get_running_loop().time
            assert self.mesh is not None
            if options.kv_events:
                work.append(EventReaders(self.fleet, clock).run())
            peers = PeerStore(_find_pod_name(), self._set_peers, self.mesh.set_hosts)
            work.append(
                watch_namespace(
                    self.world,
                    options.namespace,
                    options.watch,
                    peers=peers,
                    deliver_keys=self.fleet.keys.replace,
                    clock=clock,
                )
            )
        return work

    def _set_peers(self, found: frozenset[str]) -> None:
        """Other gateways as last found; the other workers of this one are always peers."""
        assert self.mesh is not None
        self.mesh.set_peers(found | self._siblings)

    def _load_static(self) -> None:
        options = self._options
        parsed = [
            parse_static(
                flag,
                policy=Policy(options.routing),
                price_of_recompute=options.price_of_recompute,
                weights=options.weights,
            )
            for flag in options.static
        ]
        self.world.set_pools([pool for pool, _ in parsed], source=_STATIC)
        self.world.set_replicas([replica for _, replicas in parsed for replica in replicas], source=_STATIC)

    # The data loop's timer.

    async def _tick(self) -> None:
        interval = self._options.relay.sweep_seconds
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + interval, loop.time())
            await asyncio.sleep(due - loop.time())
            now = loop.time()
            self._metrics.loop_lag.set(max(0.0, now - due))
            self.relay.sweep()
            self.fleet.tick(now)
            if self._trimmer.look(self.relay.num_requests, now):
                await self._trimmer.give_back()
            self._publisher.publish(now)
            self._probe_suspects(now)

    def _probe_suspects(self, now: float) -> None:
        """Ask replicas that failed too few clients to be judged by them, and those whose ejection ran out."""
        for name, state in self.fleet.pools.items():
            for uid in state.verdict.suspects | state.verdict.probing:
                if now - self._probed_at.get(uid, -math.inf) < _PROBE_SECONDS:
                    continue
                self._probed_at[uid] = now
                request = ProbeRequest(name, uid, _PROBE_SECONDS)
                task = asyncio.get_running_loop().create_task(self._send_probe(request))
                self._probes.add(task)
                task.add_done_callback(self._probes.discard)
        if len(self._probed_at) > _MAX_PROBED:
            self._probed_at.clear()

    async def _send_probe(self, request: ProbeRequest) -> ProbeResult:
        model = self._vitals.models.get(request.pool)
        return await probe(
            request,
            model=model,
            address=(find_local_host(self._options.host).strip("[]"), self.port),
            secret=self._pin_secret,
        )

    def make_metrics_text(self) -> str:
        """Prometheus text of everything counted so far."""
        return self._metrics.render().decode()

    # The admin thread.

    def _make_actions(self) -> AdminActions:
        return AdminActions(
            health=self._vitals.health,
            ready=self._vitals.ready,
            metrics=lambda: AdminAnswer(
                200, self._metrics.render(), b"text/plain; version=0.0.4; charset=utf-8"
            ),
            report=lambda: AdminAnswer(200, self._vitals.report),
            probe=self._send_probe,
            state=lambda: AdminAnswer(200 if self._vitals.state else 503, self._vitals.state),
        )


def _find_pod_name() -> str:
    return os.environ.get("POD_NAME") or socket.gethostname()
