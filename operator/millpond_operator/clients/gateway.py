"""Calls to a gateway pod's admin port: its report, and a real request through its data path."""

from __future__ import annotations

from typing import Protocol, TypeVar

import httpx2
import msgspec

from millpond_common.contract import ports
from millpond_common.contract.engine_state import EngineState
from millpond_common.contract.gateway_report import GatewayReport, ProbeRequest, ProbeResult
from millpond_operator.errors import GatewayCallError

MAX_REPORT_BYTES = 8 * 1024 * 1024
MAX_CONNECTIONS = 100

T = TypeVar("T")


class GatewayCaller(Protocol):
    """What the operator asks of a gateway pod, or of an engine that no gateway serves."""

    async def fetch_report(self, address: str) -> GatewayReport:
        """Fetch demand and endpoints as this gateway sees them; GatewayCallError when it does not answer."""
        ...

    async def probe(self, address: str, request: ProbeRequest) -> ProbeResult:
        """Have one real one-token request sent to one replica; GatewayCallError when the gateway does not answer."""
        ...

    async def probe_engine(self, address: str, model: str, *, timeout_seconds: float) -> ProbeResult:
        """Send a real one-token request straight to a replica; GatewayCallError when it does not answer."""
        ...


class EngineCaller(Protocol):
    """What the autoscaler asks of an engine."""

    async def fetch_state(self, address: str) -> EngineState:
        """Fetch load, caches and speeds of a replica; GatewayCallError when it does not answer."""
        ...


class Caller(GatewayCaller, EngineCaller, Protocol):
    """Everything the operator asks of pods."""


class GatewayClient:
    """The caller used in a cluster: plain HTTP to the pod's address, inside the network policy's allowance."""

    def __init__(self, *, port: int = ports.GATEWAY_ADMIN, timeout_seconds: float = 5.0) -> None:
        self._port = port
        self._http = httpx2.AsyncClient(timeout=timeout_seconds, trust_env=False)
        # An engine is asked so seldom that a kept connection would only be looked at by the calls to all others.
        limits = httpx2.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=0)
        self._engines = httpx2.AsyncClient(limits=limits, timeout=timeout_seconds, trust_env=False)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()
        await self._engines.aclose()

    async def fetch_report(self, address: str) -> GatewayReport:
        """Fetch `GET /v1/report`."""
        body = await self._call("GET", address, "/v1/report")
        return _decode(body, GatewayReport, address)

    async def probe(self, address: str, request: ProbeRequest) -> ProbeResult:
        """Call `POST /v1/probe` and wait a little longer than the gateway itself does."""
        body = await self._call(
            "POST",
            address,
            "/v1/probe",
            content=msgspec.json.encode(request),
            timeout_seconds=request.timeout_seconds + 5,
        )
        return _decode(body, ProbeResult, address)

    async def probe_engine(self, address: str, model: str, *, timeout_seconds: float) -> ProbeResult:
        """Call `POST /v1/completions` of the engine."""
        body = {"model": model, "prompt": "1", "max_tokens": 1, "temperature": 0}
        await self._call(
            "POST",
            address,
            "/v1/completions",
            port=ports.ENGINE_HTTP,
            content=msgspec.json.encode(body),
            timeout_seconds=timeout_seconds,
        )
        return ProbeResult(ok=True, status=200, message="", seconds=0.0)

    async def fetch_state(self, address: str) -> EngineState:
        """Fetch `GET /v1/state` of the engine."""
        body = await self._call("GET", address, "/v1/state", port=ports.ENGINE_HTTP)
        return _decode(body, EngineState, address)

    async def _call(
        self,
        method: str,
        address: str,
        path: str,
        *,
        port: int | None = None,
        content: bytes | None = None,
        timeout_seconds: float = 5.0,
    ) -> bytes:
        host = f"[{address}]" if ":" in address else address
        url = f"http://{host}:{port or self._port}{path}"
        headers = {"content-type": "application/json"} if content is not None else {}
        try:
            http = self._http if port is None else self._engines
            async with http.stream(
                method, url, content=content, headers=headers, timeout=timeout_seconds
            ) as response:
                body = await _read_bounded(response, url)
        except (httpx2.HTTPError, OSError) as error:
            raise GatewayCallError(f"{method} {url}: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise GatewayCallError(f"{method} {url}: HTTP {response.status_code}: {body[:200]!r}")
        return body


async def _read_bounded(response: httpx2.Response, url: str) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in response.aiter_bytes():
        size += len(chunk)
        if size > MAX_REPORT_BYTES:
            raise GatewayCallError(f"{url} answers more than {MAX_REPORT_BYTES} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def _decode(body: bytes, kind: type[T], address: str) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise GatewayCallError(f"{address} answered something else than {kind.__name__}: {error}") from error
