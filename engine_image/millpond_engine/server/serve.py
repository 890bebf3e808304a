"""The process around the server: ports, signals, and the way out.

Exit: 0 after a drain (also one that begins while the model loads), 1 when the engine failed.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from dataclasses import dataclass

import structlog
from aiohttp import web

from millpond_common.contract.openai import ApiError
from millpond_engine.loop.snapshot import LoopPhase
from millpond_engine.server.admin import make_admin_app
from millpond_engine.server.app import make_error_response, make_tenant_app, set_common_headers
from millpond_engine.server.context import ServerContext
from millpond_engine.server.intake import get_request_id
from millpond_engine.server.protocol import EngineProtocol, EngineSite

log = structlog.get_logger(__name__)

_FLUSH_SECONDS = 1.0
"""After a failure: time for error events to reach their clients."""
_MAX_HEAD_BYTES = 40 * 1024
_STOP_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Ports:
    """Where to listen; 0 takes a free port, which the log line `listening` names."""

    host: str = "0.0.0.0"  # noqa: S104 - a pod's server listens on all its addresses
    port: int = 8000
    admin_host: str = "0.0.0.0"  # noqa: S104 - as above; a NetworkPolicy keeps tenants away
    admin_port: int = 8001


@dataclass(frozen=True, slots=True)
class BoundPorts:
    """The ports that were bound."""

    port: int
    admin_port: int


class Server:
    """Both ports of one engine. Owned by the event loop."""

    def __init__(self, context: ServerContext, ports: Ports) -> None:
        self._context = context
        self._ports = ports
        self._runners: list[web.AppRunner] = []
        self._failed = asyncio.Event()
        self._failure = ""

    async def start(self) -> BoundPorts:
        """Listen, then start the engine thread, so that probes are answered while the model loads."""
        loop = asyncio.get_running_loop()

        def report(message: str) -> None:
            loop.call_soon_threadsafe(self._note_failure, message)

        self._context.thread.on_failure = report
        port = await self._listen(make_tenant_app(self._context), self._ports.host, self._ports.port)
        admin = await self._listen(
            make_admin_app(self._context), self._ports.admin_host, self._ports.admin_port
        )
        self._context.thread.start()
        log.info("listening", port=port, admin_port=admin, epoch=self._context.epoch)
        return BoundPorts(port, admin)

    async def wait(self) -> int:
        """Wait for a drain or a failure; returns the exit code."""
        drained = asyncio.create_task(self._context.lifecycle.drained.wait())
        failed = asyncio.create_task(self._failed.wait())
        await asyncio.wait({drained, failed}, return_when=asyncio.FIRST_COMPLETED)
        for task in (drained, failed):
            task.cancel()
        if self._failed.is_set() and not self._context.lifecycle.draining:
            log.error("engine failed", failure=self._failure)
            await asyncio.sleep(_FLUSH_SECONDS)
            return 1
        return 0

    async def stop(self) -> bool:
        """Close the ports and the engine thread; False when that thread did not end in time."""
        for runner in self._runners:
            await runner.cleanup()
        self._context.executor.shutdown(wait=False, cancel_futures=True)
        if self._context.grammars is not None:
            self._context.grammars.close()
        loading = self._context.thread.snapshot.phase is LoopPhase.LOADING
        seconds = 1.0 if loading else _STOP_SECONDS
        return await asyncio.to_thread(self._context.thread.stop, timeout_seconds=seconds)

    def _note_failure(self, message: str) -> None:
        self._failure = message
        self._failed.set()

    async def _listen(self, app: web.Application, host: str, port: int) -> int:
        runner = web.AppRunner(app, handle_signals=False, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        self._runners.append(runner)
        listener = _bind(host, port)
        await EngineSite(runner, listener, lambda: self._make_protocol(runner.server)).start()
        return int(listener.getsockname()[1])

    def _make_protocol(self, server: web.Server | None) -> EngineProtocol:
        assert server is not None, "only a set-up runner accepts connections"

        def answer(request: web.BaseRequest, error: ApiError) -> web.Response:
            response = make_error_response(error)
            set_common_headers(response, get_request_id(request), self._context.epoch)
            return response

        return EngineProtocol(
            server,
            answer,
            loop=asyncio.get_running_loop(),
            access_log=None,
            auto_decompress=False,  # a small body must not become a large one before its size is checked
            keepalive_timeout=self._context.limits.idle_connection_seconds,
            # More than the gateway takes for a whole head: what it lets through is read here, not refused.
            max_line_size=_MAX_HEAD_BYTES,
            max_field_size=_MAX_HEAD_BYTES,
            lingering_time=2.0,
        )


def _bind(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.setblocking(False)
    return listener


async def serve(context: ServerContext, ports: Ports) -> tuple[int, bool]:
    """Serve until SIGTERM or SIGINT has drained the engine; (exit code, everything ended in order)."""
    server = Server(context, ports)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, context.lifecycle.start_drain)
    await server.start()
    code = await server.wait()
    clean = await server.stop()
    log.info("stopped", code=code, clean=clean)
    return code, clean
