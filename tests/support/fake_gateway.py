"""Gateways that see the pods of a FakeKubelet, for operator tests without a data path."""

from __future__ import annotations

from typing import Any

from tests.support.engine_states import make_engine_state
from tests.support.kubelet import FakeKubelet

from millpond_common.contract import labels
from millpond_common.contract.engine_state import EngineState
from millpond_common.contract.gateway_report import (
    EndpointReport,
    GatewayReport,
    PoolReport,
    ProbeRequest,
    ProbeResult,
)
from millpond_operator.errors import GatewayCallError

Manifest = dict[str, Any]


class FakeGateway:
    """Answers as every gateway pod of the namespace; the test steers what it sees and says."""

    def __init__(self, kubelet: FakeKubelet) -> None:
        self._kubelet = kubelet
        self.hidden: set[str] = set()
        """Names of engine pods it has not noticed yet."""
        self.hide_new = False
        """Whether it notices no pod that it has not reported before."""
        self.open_requests: dict[str, int] = {}
        self.unique_cached_tokens: dict[str, int] = {}
        self.demand: dict[str, dict[str, Any]] = {}
        """Further fields of each pool's report."""
        self.quiet_pools: set[str] = set()
        """Pools it knows without knowing a replica of them."""
        self.states: dict[str, dict[str, Any]] = {}
        """By pool, fields in which its engines' states differ from an idle one."""
        self.state_failure: str | None = None
        self.probe_failure: str | None = None
        self.unreachable = False
        self.probes: list[str] = []
        self.direct: list[str] = []
        """Addresses of engines that were asked without a gateway."""
        self._known: set[str] = set()

    async def fetch_report(self, address: str) -> GatewayReport:
        """The report of the gateway pod at the address."""
        if self.unreachable:
            raise GatewayCallError(f"GET http://{address}/v1/report: connection refused")
        pools: dict[str, list[EndpointReport]] = {name: [] for name in self.quiet_pools}
        for pod in list(self._kubelet.pods):
            own = pod["metadata"].get("labels") or {}
            if own.get(labels.COMPONENT) == labels.ENGINE_COMPONENT and self._notices(pod):
                pools.setdefault(own[labels.POOL], []).append(self._make_endpoint(pod))
        return GatewayReport(
            gateway=address,
            epoch="1",
            observed_at=0.0,
            view_age_seconds=0.0,
            synced=True,
            pools=tuple(
                PoolReport(pool=name, endpoints=tuple(found), **self.demand.get(name, {}))
                for name, found in sorted(pools.items())
            ),
        )

    async def probe(self, address: str, request: ProbeRequest) -> ProbeResult:
        """Answer for a replica that exists."""
        self.probes.append(request.pod_uid)
        if self.probe_failure is not None:
            return ProbeResult(ok=False, status=500, message=self.probe_failure, seconds=0.01)
        there = any(pod["metadata"]["uid"] == request.pod_uid for pod in self._kubelet.pods)
        return ProbeResult(
            ok=there, status=200 if there else 404, message="" if there else "unknown", seconds=0.01
        )

    async def probe_engine(self, address: str, model: str, *, timeout_seconds: float) -> ProbeResult:
        """Answer as the engine at the address."""
        assert model
        assert timeout_seconds > 0
        self.direct.append(address)
        return ProbeResult(ok=True, status=200, message="", seconds=0.01)

    async def fetch_state(self, address: str) -> EngineState:
        """The state of the engine at the address."""
        if self.state_failure is not None:
            raise GatewayCallError(f"GET http://{address}/v1/state: {self.state_failure}")
        pod = next(
            (p for p in list(self._kubelet.pods) if (p.get("status") or {}).get("podIP") == address), None
        )
        if pod is None:
            raise GatewayCallError(f"GET http://{address}/v1/state: no route to host")
        return make_engine_state(**self.states.get(pod["metadata"]["labels"][labels.POOL], {}))

    def _notices(self, pod: Manifest) -> bool:
        name = pod["metadata"]["name"]
        if name in self.hidden or (self.hide_new and name not in self._known):
            return False
        self._known.add(name)
        return True

    def _make_endpoint(self, pod: Manifest) -> EndpointReport:
        metadata = pod["metadata"]
        own = metadata.get("labels") or {}
        conditions = (pod.get("status") or {}).get("conditions") or []
        ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
        leaving = bool(metadata.get("deletionTimestamp")) or own.get(labels.CORDONED) == "true"
        return EndpointReport(
            pod=metadata["name"],
            pod_uid=metadata["uid"],
            revision=own.get(labels.REVISION, ""),
            role=own.get(labels.ROLE, ""),
            routable=ready and not leaving,
            open_requests=self.open_requests.get(metadata["name"], 0),
            uncached_tokens=0,
            unique_cached_tokens=self.unique_cached_tokens.get(metadata["name"], 0),
        )
