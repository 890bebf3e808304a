"""Calls to a gateway pod's admin port: its report, and a real request through its data path."""

from __future__ import annotations

from typing import Protocol, TypeVar

import aiohttp
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
        self._timeout_seconds = timeout_seconds
        self._sessions: dict[bool, aiohttp.ClientSession] = {}

    async def close(self) -> None:
        """Close all connections."""
        for session in self._sessions.values():
            await session.close()

    def _open(self, *, keep: bool) -> aiohttp.ClientSession:
        """The session of gateways, which keeps its connections, or of engines, which are asked too seldom for that.

        Made at the first call, since it belongs to the loop that runs then.
        """
        if keep not in self._sessions:
            connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS, force_close=not keep)
            self._sessions[keep] = aiohttp.ClientSession(
                connector=connector, cookie_jar=aiohttp.DummyCookieJar()
            )
        return self._sessions[keep]

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
        timeout_seconds: float | None = None,
    ) -> bytes:
        host = f"[{address}]" if ":" in address else address
        url = f"http://{host}:{port or self._port}{path}"
        headers = {"content-type": "application/json"} if content is not None else {}
        limit = aiohttp.ClientTimeout(total=timeout_seconds or self._timeout_seconds)
        try:
            async with self._open(keep=port is None).request(
                method, url, data=content, headers=headers, timeout=limit, allow_redirects=False
            ) as response:
                body = await _read_bounded(response, url)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise GatewayCallError(f"{method} {url}: {type(error).__name__}: {error}") from error
        if response.status != 200:
            raise GatewayCallError(f"{method} {url}: HTTP {response.status}: {body[:200]!r}")
        return body


async def _read_bounded(response: aiohttp.ClientResponse, url: str) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in response.content.iter_any():
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
