"""A connection of the server: errors below the application in one shape, and clients that only stop sending.

aiohttp answers what it cannot parse with plain text and takes the end of a client's sending for its leaving;
here the first is an OpenAI error and the second is found out.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import structlog
from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from millpond_common.contract.openai import ApiError, ErrorCode
from millpond_common.half_closed import has_left
from millpond_common.pace import Pace

log = structlog.get_logger(__name__)

_LOOKS_SECONDS = (0.02, 0.06, 0.2, 0.7, 2.0)
"""When to look, after a client stopped sending, whether it is gone. The first look leaves the application time to
take a request that came together with the end; a reset takes one round trip.
"""
_MAX_DETAIL = 200
_FAILURES = Pace(seconds=1.0)
"""Of all connections: each may send garbage without end."""

MakeResponse = Callable[[web.BaseRequest, ApiError], web.Response]


class EngineProtocol(web.RequestHandler):
    """One client connection."""

    __slots__ = ("_begun", "_make_response", "_probed", "_served")

    def __init__(self, manager: web.Server, make_response: MakeResponse, **options: Any) -> None:
        super().__init__(manager, **options)
        self._make_response = make_response
        self._served: web.BaseRequest | None = None
        """Request that the application is working on."""
        self._begun = False
        """The head of its answer is sent."""
        self._probed = False

    def serve(self, request: web.BaseRequest) -> None:
        """The application has taken this request."""
        self._served, self._begun = request, False

    def begin_answer(self) -> None:
        """The answer's head is about to be sent."""
        self._begun = True

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send what is left of an answer; the connection is idle after it."""
        if isinstance(resp, web.HTTPException):  # raised around the application: an unknown expectation
            text = "the request asks for something that HTTP allows and this server does not do"
            resp = self._make_response(request, ApiError(ErrorCode.INVALID_VALUE, text))
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._served = None

    def eof_received(self) -> bool:  # type: ignore[override] # asyncio reads the value; aiohttp declares none
        """Keep the connection of a client that stopped sending, for the answer it may still read."""
        loop = asyncio.get_running_loop()
        for seconds in _LOOKS_SECONDS:
            loop.call_later(seconds, self._look)
        return True

    def _look(self) -> None:
        """Find out whether a client that stopped sending has left; if so, or if nothing is owed to it, close.

        Leaving and waiting look the same until something is sent: a host whose program is gone answers that with
        a reset. A stream is probe enough. Before an answer begins an interim one is sent, which HTTP/1.0 does not
        know: there the end of sending means leaving, as it does in the middle of a body.
        """
        request, transport = self._served, self.transport
        if transport is None:
            return
        if request is None or request.version < HttpVersion11 or not request.content.is_eof():
            transport.close()
        elif self._probed:
            if has_left(transport):
                transport.abort()
        else:
            self._probed = True
            self.close()  # nothing can follow: the connection ends with this answer
            if not self._begun:
                transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what never reached the application, or what it failed at, in the shape of all errors.

        Raises:
            ConnectionError: the client has left, or an answer has begun: nothing can be said any more.
        """
        if isinstance(exc, ConnectionError):
            raise exc  # leaving is no failure of ours, and clients leave often
        if times := _FAILURES.count():
            kind = type(exc).__name__
            log.warning("request failed below the application", status=status, error_type=kind, times=times)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun")
        response = self._make_response(request, _describe(status, exc, message))
        response.force_close()
        return response


def _describe(status: int, error: BaseException | None, message: str | None) -> ApiError:
    if status >= 500:
        return ApiError(ErrorCode.ENGINE_ERROR, "the engine failed to handle the request")
    if isinstance(error, LineTooLong):
        return ApiError(ErrorCode.HEAD_TOO_LARGE, "the request line or a header is too long")
    text = error.message if isinstance(error, HttpProcessingError) else message or ""
    first = text.strip().split("\n", 1)[0].rstrip(":")[:_MAX_DETAIL]  # the rest quotes the client's bytes
    shown = first.encode("ascii", "backslashreplace").decode()
    return ApiError(ErrorCode.INVALID_VALUE, f"the request is not valid HTTP/1.1: {shown or 'unreadable'}")


class EngineSite(web.BaseSite):
    """Accepts connections of a set-up runner as `EngineProtocol`."""

    def __init__(
        self, runner: web.AppRunner, listener: socket.socket, make_protocol: Callable[[], EngineProtocol]
    ) -> None:
        super().__init__(runner, backlog=1024)
        self._listener = listener
        self._make_protocol = make_protocol

    @property
    def name(self) -> str:
        """Address, for aiohttp's own messages."""
        return str(self._listener.getsockname())

    async def start(self) -> None:
        """Listen."""
        await super().start()
        self._server = await asyncio.get_running_loop().create_server(
            self._make_protocol, sock=self._listener, backlog=self._backlog
        )
