"""The relay of one process: its connections, its bounds, and what requests have in common."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Coroutine
from typing import Any, Final

from millpond_common.contract.openai import ApiError, ErrorCode
from millpond_gateway.proxy import headers
from millpond_gateway.proxy.body import parse_body
from millpond_gateway.proxy.client import ClientConnection
from millpond_gateway.proxy.connections import Connections
from millpond_gateway.proxy.dispatch import Call, Caller, Dispatcher, Observer, Outcome, Record, Target
from millpond_gateway.proxy.exchange import Exchange
from millpond_gateway.proxy.hedged import HedgedExchange
from millpond_gateway.proxy.models import make_model_answer
from millpond_gateway.proxy.proof import find_evidence, is_waiting
from millpond_gateway.proxy.records import ParsedBody, RequestHead
from millpond_gateway.proxy.reply import Reply
from millpond_gateway.proxy.retry import Evidence
from millpond_gateway.proxy.settings import RelaySettings

MODELS: Final = b"/v1/models"
FORWARDED: Final = frozenset({b"/v1/completions", b"/v1/chat/completions", b"/tokenize", b"/detokenize"})
_JSON: Final = b"application/json"
_NO_BODY: Final = ParsedBody("", False, b"", b"", None, 1, "", "", 0)


class Relay:
    """Everything the connections of one process share; used from one event loop."""

    def __init__(self, settings: RelaySettings, dispatcher: Dispatcher, observer: Observer) -> None:
        self.settings = settings
        self.dispatcher = dispatcher
        self._observer = observer
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time
        self.connections = Connections(
            idle_seconds=settings.engine_idle_seconds,
            connect_seconds=settings.connect_seconds,
            clock=self.now,
        )
        self.max_sockets: float = math.inf
        """Connections to clients and engines together that the descriptor limit allows."""
        self.draining = False
        """Every answer from now on says that it closes its connection."""
        self.leaving = False
        """No connection is accepted any more, and what is idle is closed."""
        self.deserted = asyncio.Event()
        """No client is connected."""
        self.deserted.set()
        self.last_client_at = self.now()
        """When the newest connection came."""
        self.num_requests = 0
        self.buffered_bytes = 0
        self._clients: set[ClientConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._owners: dict[Exchange, tuple[ClientConnection, Reply]] = {}
        self._prefix = f"mp-{secrets.token_hex(6)}-"
        self._counter = 0

    @property
    def num_clients(self) -> int:
        """Open client connections."""
        return len(self._clients)

    def list_open(self) -> list[tuple[ClientConnection, Reply]]:
        """Connections that wait for an answer, and the answers."""
        return list(self._owners.values())

    # Clients.

    def on_client(self, client: ClientConnection) -> bool:
        """Register a connection; False when there are too many."""
        self._clients.add(client)
        self.last_client_at = self.now()
        self.deserted.clear()
        return len(self._clients) <= self.settings.max_connections

    def on_client_lost(self, client: ClientConnection) -> None:
        """Forget a connection."""
        self._clients.discard(client)
        if not self._clients:
            self.deserted.set()

    def take_body(self, num_bytes: int) -> bool:
        """Reserve memory for a request body; False past the bound of all bodies together."""
        if self.buffered_bytes + num_bytes > self.settings.max_buffered_body_bytes:
            return False
        self.buffered_bytes += num_bytes
        return True

    def give_body_back(self, num_bytes: int) -> None:
        """Free what `take_body` reserved."""
        self.buffered_bytes -= num_bytes

    def choose_request_id(self, head: RequestHead | None) -> bytes:
        """The client's request id, or a new one."""
        self._counter += 1
        made = f"{self._prefix}{self._counter:x}".encode()
        offered = head.index.get(headers.REQUEST_ID) if head is not None else None
        return headers.choose_request_id(offered, made) if offered else made

    # Requests.

    def check_head(self, head: RequestHead) -> Caller | ApiError:
        """Refuse before the body is read what can be refused by its head."""
        forwarded = head.path in FORWARDED
        if not forwarded or head.method != b"POST":
            unknown = self._find_unknown(head)
            if unknown is not None:
                return unknown
        if self.num_requests >= self.settings.max_requests:
            return ApiError(
                ErrorCode.OVERLOADED, "the gateway has too many open requests", retry_after_seconds=1
            )
        if len(self._clients) + self.connections.num_open >= self.max_sockets:
            message = "the gateway has no descriptor left for another connection"
            return ApiError(ErrorCode.OVERLOADED, message, retry_after_seconds=1)
        if forwarded:
            refusal = check_content(head)
            if refusal is not None:
                return refusal
        return self.dispatcher.identify(head, self.now())

    def _find_unknown(self, head: RequestHead) -> ApiError | None:
        """Why a path or its method is not served."""
        allowed = self.allowed_methods(head)
        if not allowed:
            path = head.path[:200].decode("latin-1")
            return ApiError(
                ErrorCode.NOT_FOUND,
                f"there is no {path} here; see /v1/models, /v1/chat/completions, /v1/completions",
            )
        if head.method not in allowed.split(b", "):
            return ApiError(
                ErrorCode.METHOD_NOT_ALLOWED,
                f"{head.path.decode('latin-1')} does not take {head.method.decode('latin-1')}",
            )
        return None

    def allowed_methods(self, head: RequestHead) -> bytes:
        """Methods of a path, as an `Allow` header; empty for an unknown path."""
        if head.path in FORWARDED:
            return b"POST"
        if head.path == MODELS or head.path.startswith(MODELS + b"/"):
            return b"GET, HEAD"
        return b""

    def start(
        self,
        client: ClientConnection,
        transport: asyncio.Transport,
        head: RequestHead,
        caller: Caller,
        body: bytes,
        *,
        pipelined: bool,
    ) -> Exchange | None:
        """Begin a complete request; None when it is answered already."""
        request_id = self.choose_request_id(head)
        close = not head.keep_alive or self.draining or pipelined
        forwarded = head.path in FORWARDED
        parsed = parse_body(body) if forwarded else _NO_BODY
        reply = Reply(
            transport,
            request_id=request_id,
            http_1_1=head.http_1_1,
            close=close,
            without_body=head.method == b"HEAD",
            hides_usage=self.settings.hidden_usage and isinstance(parsed, ParsedBody) and parsed.hides_usage,
        )
        self._counter += 1
        call = Call(
            id=f"{self._counter:x}",
            client=client.address,
            request_id=request_id.decode("latin-1"),
            path=head.path.decode("latin-1"),
            caller=self.dispatcher.place(caller, parsed.model) if isinstance(parsed, ParsedBody) else caller,
            body=parsed if isinstance(parsed, ParsedBody) else _NO_BODY,
            session=head.index.get(headers.SESSION),
            arrived_at=self.now(),
            trace=self._observer.begin(head) if forwarded else None,
        )
        if forwarded and isinstance(parsed, ParsedBody):
            self.num_requests += 1
            exchange = HedgedExchange(self, reply, head=head, call=call, body=body)
            self._owners[exchange] = (client, reply)
            return exchange
        self.give_body_back(len(body))
        answer = (
            parsed
            if isinstance(parsed, ApiError)
            else make_model_answer(head.path, self.dispatcher.find_models(caller))
        )
        if isinstance(answer, ApiError):
            reply.refuse(answer)
        else:
            reply.answer(200, answer)
        self._observe(
            head, call.request_id, reply.status, answer.code.value if isinstance(answer, ApiError) else ""
        )
        client.on_answered(close=reply.close)
        return None

    def on_exchange_end(self, exchange: Exchange, record: Record) -> None:
        """Let the connection go on and tell the observer."""
        self.num_requests -= 1
        client, reply = self._owners.pop(exchange)
        self._observer.observe(record)
        client.on_answered(close=reply.close)

    def on_refused(self, head: RequestHead | None, request_id: bytes, error: ApiError) -> None:
        """Record a request that was refused by its head."""
        self._observe(head, request_id.decode("latin-1"), error.status, error.code.value)

    def _observe(self, head: RequestHead | None, request_id: str, status: int, reason: str) -> None:
        record = Record(
            request_id=request_id,
            method=head.method.decode("latin-1") if head is not None else "",
            path=head.path[:200].decode("latin-1") if head is not None else "",
            model="",
            tenant="",
            traffic_class="",
            endpoint="",
            status=status,
            outcome=Outcome.REFUSED if reason else Outcome.COMPLETED,
            reason=reason,
            stream=False,
            attempts=0,
            seconds=0.0,
            first_byte_seconds=None,
            bytes_in=0,
            bytes_out=0,
        )
        self._observer.observe(record)

    # Work beside the data path.

    async def find_evidence(self, target: Target, request_id: str) -> Evidence:
        """Ask whether a broken engine had started a request."""
        return await find_evidence(
            self.connections, target, request_id, timeout_seconds=self.settings.proof_seconds
        )

    async def is_waiting(self, target: Target, request_id: str) -> bool:
        """Whether an engine says that it has not begun a request; False when it does not say."""
        return await is_waiting(
            self.connections, target, request_id, timeout_seconds=self.settings.proof_seconds
        )

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine of an exchange; its errors are defects and end up in the loop's handler."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def sweep(self) -> None:
        """Look at every deadline."""
        now = self.now()
        for client in list(self._clients):
            client.check(now)
        self.connections.sweep()

    def begin_drain(self) -> None:
        """Close what is idle, and every other connection after its next answer."""
        self.draining = self.leaving = True
        self.sweep()

    def shut_down(self) -> None:
        """End what the grace did not suffice for, each stream with its error event."""
        for client in list(self._clients):
            client.shut_down()
        self.connections.close()


def check_content(head: RequestHead) -> ApiError | None:
    """Refuse a body that is compressed or declared to be something else than JSON."""
    encoding = head.index.get(b"content-encoding")
    if encoding is not None and encoding.strip().lower() not in {b"identity", b""}:
        return ApiError(
            ErrorCode.UNSUPPORTED_MEDIA_TYPE, "compressed request bodies are not read: send plain JSON"
        )
    told = head.index.get(b"content-type", b"")
    if told != _JSON and told.partition(b";")[0].strip().lower() != _JSON:
        return ApiError(ErrorCode.INVALID_VALUE, "the Content-Type must be application/json")
    return None
