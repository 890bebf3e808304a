"""The admin server: health, readiness, metrics, report and probe, on its own port, thread and event loop."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

import msgspec

from millpond_common.contract.gateway_report import ProbeRequest, ProbeResult
from millpond_common.contract.openai import ApiError, ErrorCode
from millpond_gateway.proxy import headers
from millpond_gateway.proxy.errors import BadRequestError
from millpond_gateway.proxy.http1 import RequestReader
from millpond_gateway.proxy.records import RequestHead
from millpond_gateway.proxy.settings import RelaySettings

_LIMITS = RelaySettings(max_head_bytes=8192, max_body_bytes=65_536)
_MAX_CONNECTIONS = 256
_IDLE_SECONDS = 120.0
"""Keep-alive after an answer."""
_REQUEST_SECONDS = 10.0
"""From a connection, or the first byte of a further request, to the end of that request."""
STATE_PATH = b"/v1/worker"
_METHODS = {
    b"/health": b"GET",
    b"/ready": b"GET",
    b"/metrics": b"GET",
    b"/v1/report": b"GET",
    b"/v1/probe": b"POST",
}


@dataclass(frozen=True, slots=True)
class AdminAnswer:
    """Status and body of one answer."""

    status: int
    body: bytes
    content_type: bytes = b"application/json"


Answering = AdminAnswer | Awaitable[AdminAnswer]


@dataclass(frozen=True, slots=True)
class AdminActions:
    """What the admin server can tell and do; called on its thread, so they only read what is published for it."""

    health: Callable[[], Answering]
    ready: Callable[[], Answering]
    metrics: Callable[[], Answering]
    report: Callable[[], Answering]
    probe: Callable[[ProbeRequest], Awaitable[ProbeResult]]
    state: Callable[[], Answering] | None = None
    """Of a worker, for its supervisor: everything that is merged, on a socket that nobody else reaches."""


class AdminServer:
    """Runs in a daemon thread from `start` to `stop`."""

    def __init__(self, sock: socket.socket, actions: AdminActions) -> None:
        self.socket = sock
        self.actions = actions
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="admin", daemon=True)
        self._serving = threading.Event()
        self.connections: dict[_AdminConnection, None] = {}
        """Open ones, the one that waited longest for a request first."""
        self.tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Serve; back when it does, since a loop that is stopped before has nothing to stop."""
        self._thread.start()
        self._serving.wait(timeout=5.0)

    def stop(self) -> None:
        """Stop serving."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=2.0)

    def make_room(self) -> None:
        """Keep within the bound: whoever has waited longest without a request goes, never a probe that just came."""
        if len(self.connections) > _MAX_CONNECTIONS:
            waiting = (connection for connection in self.connections if not connection.busy)
            connection = next(waiting, next(reversed(self.connections)))
            self.connections.pop(connection)
            connection.abort()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        local = self.socket.family == socket.AF_UNIX
        create = self._loop.create_unix_server if local else self._loop.create_server
        server = self._loop.run_until_complete(
            create(lambda: _AdminConnection(self, self._loop), sock=self.socket)
        )
        self._serving.set()
        try:
            self._loop.run_forever()
        finally:
            server.close()
            for task in list(self.tasks):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()


class _AdminConnection(asyncio.Protocol):
    def __init__(self, server: AdminServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._reader = RequestReader(_LIMITS)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.busy = False
        """A request is being answered."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but name
        self._server.connections[self] = None
        self._wait(_REQUEST_SECONDS)
        self._server.make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._server.connections.pop(self, None)
        self._stop_waiting()

    def abort(self) -> None:
        """Cut the connection."""
        if self._transport is not None:
            self._transport.abort()

    def _wait(self, seconds: float) -> None:
        """Give the client this long for its next request."""
        self._stop_waiting()
        self._timer = self._loop.call_later(seconds, self.abort)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        if not reader.started:
            self._wait(_REQUEST_SECONDS)
        try:
            reader.feed(data)
        except BadRequestError as error:
            self._send_error(error.error)
            return
        if self.busy or not reader.complete or reader.head is None:
            return
        self.busy = True
        self._stop_waiting()
        task = self._loop.create_task(self._answer(reader.head, reader.take_body()))
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)

    async def _answer(self, head: RequestHead, body: bytes) -> None:
        allowed = _METHODS.get(head.path)
        if head.path == STATE_PATH and self._server.actions.state is not None:
            allowed = b"GET"
        if allowed is None:
            self._send_error(
                ApiError(
                    ErrorCode.NOT_FOUND, f"no such path; there are {', '.join(p.decode() for p in _METHODS)}"
                )
            )
        elif head.method not in {allowed, b"HEAD"}:
            self._send_error(ApiError(ErrorCode.METHOD_NOT_ALLOWED, f"use {allowed.decode()}"), allow=allowed)
        elif head.path == b"/v1/probe":
            await self._probe(body, keep=head.keep_alive)
        else:
            actions = self._server.actions
            table = {
                b"/health": actions.health,
                b"/ready": actions.ready,
                b"/metrics": actions.metrics,
                b"/v1/report": actions.report,
                STATE_PATH: actions.state or actions.report,
            }
            answer = table[head.path]()
            self._send(answer if isinstance(answer, AdminAnswer) else await answer, keep=head.keep_alive)

    async def _probe(self, body: bytes, *, keep: bool) -> None:
        try:
            request = msgspec.json.decode(body, type=ProbeRequest)
        except msgspec.MsgspecError as error:
            self._send_error(ApiError(ErrorCode.INVALID_VALUE, f"not a probe request: {error}"))
            return
        result = await self._server.actions.probe(request)
        self._send(AdminAnswer(200, msgspec.json.encode(result)), keep=keep)

    def _send(self, answer: AdminAnswer, *, keep: bool) -> None:
        transport = self._transport
        if transport is None:
            return
        keep = keep and not self._reader.pipelined
        transport.write(
            headers.make_answer(answer.status, answer.body, close=not keep, content_type=answer.content_type)
        )
        if not keep:
            self._close(transport)
            return
        self.busy = False
        self._reader.restart()
        self._server.connections[self] = self._server.connections.pop(self, None)
        self._wait(_IDLE_SECONDS)

    def _send_error(self, error: ApiError, *, allow: bytes = b"") -> None:
        if self._transport is not None:
            self._transport.write(headers.make_error_answer(error, close=True, allow=allow))
            self._close(self._transport)

    def _close(self, transport: asyncio.Transport) -> None:
        """Close once the answer is out, or the client has had time to take it."""
        self.busy = False
        transport.close()
        self._wait(_REQUEST_SECONDS)
