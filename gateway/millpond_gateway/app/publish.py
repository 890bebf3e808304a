"""What the data loop publishes, ten times a second, for the admin thread: vitals, gauges and the report."""

from __future__ import annotations

import math
import time

import msgspec

from millpond_common.contract.gateway_report import GatewayReport
from millpond_gateway.app.fleet import Fleet
from millpond_gateway.app.merge import WorkerState
from millpond_gateway.app.metrics import Metrics
from millpond_gateway.app.peers import PeerMesh
from millpond_gateway.app.report import make_report
from millpond_gateway.app.vitals import Vitals
from millpond_gateway.proxy.connections import make_key
from millpond_gateway.proxy.relay import Relay
from millpond_gateway.world.view import World

_REPORT_SECONDS = 0.5


class Publisher:
    """Reads the data loop's objects on that loop."""

    def __init__(
        self,
        fleet: Fleet,
        world: World,
        relay: Relay,
        *,
        mesh: PeerMesh | None,
        metrics: Metrics,
        vitals: Vitals,
        gateway: str,
        epoch: str,
        for_supervisor: bool,
    ) -> None:
        self._fleet = fleet
        self._world = world
        self._relay = relay
        self._mesh = mesh
        self._metrics = metrics
        self._vitals = vitals
        self._gateway = gateway
        self._epoch = epoch
        self._for_supervisor = for_supervisor
        self._reported_at = -math.inf

    def publish(self, now: float) -> None:
        """Renew vitals and gauges; the report twice a second."""
        vitals, metrics, relay = self._vitals, self._metrics, self._relay
        vitals.beat_at = time.monotonic()
        if vitals.synced != self._world.snapshot.synced:
            vitals.synced = self._world.snapshot.synced
            self._reported_at = -math.inf  # whoever sees it ready may ask for the report at once
        vitals.view_age_seconds = self._world.compute_age_seconds(now)
        metrics.view_age.set(vitals.view_age_seconds or 0.0)
        metrics.open_requests.set(relay.num_requests)
        metrics.client_connections.set(relay.num_clients)
        metrics.engine_connections.set(relay.connections.num_open)
        metrics.body_bytes.set(relay.buffered_bytes)
        if self._mesh is not None:
            metrics.peers_missing.set(self._mesh.num_missing)
            metrics.peers_live.set(self._mesh.shared.num_live_peers())
        if now - self._reported_at < _REPORT_SECONDS:
            return
        self._reported_at = now
        self._publish_report(now)

    def _publish_report(self, now: float) -> None:
        vitals, pools = self._vitals, self._fleet.pools
        age = vitals.view_age_seconds or 0.0
        report = make_report(
            self._fleet,
            gateway=self._gateway,
            epoch=self._epoch,
            now=now,
            unix_time=time.time(),
            view_age_seconds=age,
            synced=vitals.synced and age <= vitals.max_view_age_seconds,
        )
        vitals.report = msgspec.json.encode(report)
        if self._for_supervisor:
            vitals.state = self._encode_state(report, now)
        vitals.models = {name: state.spec.model for name, state in pools.items()}
        endpoints = [e for views in self._world.snapshot.endpoints.values() for e in views]
        self._relay.connections.forget(frozenset(make_key(endpoint) for endpoint in endpoints))
        self._count_endpoints()
        for name, state in pools.items():
            self._metrics.ejection_capped.labels(name).set(float(state.verdict.capped))
        self._metrics.index_tokens.pools = {name: state.router.index.totals for name, state in pools.items()}

    def _encode_state(self, report: GatewayReport, now: float) -> bytes:
        pools = self._fleet.pools.items()
        first_tokens = {name: pool.demand.count_first_tokens(now) for name, pool in pools}
        ready = self._vitals.ready().status == 200
        return msgspec.json.encode(WorkerState(report=report, first_tokens=first_tokens, ready=ready))

    def _count_endpoints(self) -> None:
        for pool, views in self._world.snapshot.endpoints.items():
            cordoned = sum(view.cordoned for view in views)
            ready = sum(view.ready and not view.cordoned for view in views)
            counts = {"routable": ready, "cordoned": cordoned, "not_ready": len(views) - ready - cordoned}
            for state, count in counts.items():
                self._metrics.endpoints.labels(pool, state).set(count)
