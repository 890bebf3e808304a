"""KV events of engines: subscribes, replays what was missed, fetches snapshots, and feeds the prefix index.

One reader per replica. What arrives is handed to the pure `routing.stream`, which says what to fetch; the reader
fetches beside the live stream, one thing at a time. A replica is known by its connection, never by its topic.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import structlog
import zmq
import zmq.asyncio

from millpond_common.contract import kv_events as wire
from millpond_common.contract import ports
from millpond_gateway.app.fleet import Fleet
from millpond_gateway.proxy.connections import split_address
from millpond_gateway.routing.records import EndpointView
from millpond_gateway.routing.stream import Ask, AskKind, EventStream
from millpond_gateway.world.records import Replica

_log = structlog.get_logger("events")
_FETCH_SECONDS = 10.0
"""Between two messages of a replay or a snapshot; an engine that knows no snapshots never answers."""
_FOLLOW_SECONDS = 0.5
_RECEIVE_MESSAGES = 10_000
"""Bound of what may wait unread; past it messages are dropped and the gap is replayed."""
_END = wire.END_SEQUENCE


class EventReader:
    """Follows one replica until cancelled."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        stream: EventStream,
        *,
        live: str,
        replay: str | None,
        clock: Callable[[], float],
    ) -> None:
        self._context = context
        self._stream = stream
        self._live = live
        self._replay = replay
        self._clock = clock
        self._asks: asyncio.Queue[Ask] = asyncio.Queue(maxsize=64)

    async def run(self) -> None:
        """Subscribe and feed."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._fetch_forever())

    async def _follow(self) -> None:
        with self._open(zmq.SUB, self._live) as socket:
            socket.subscribe(b"")
            while True:
                frames = await socket.recv_multipart()
                if len(frames) == 3 and len(frames[1]) == 8:
                    sequence = int.from_bytes(frames[1], "big")
                    self._take(self._stream.live(sequence, frames[2], self._clock()))

    def _take(self, asks: Iterable[Ask]) -> None:
        for ask in asks:
            with contextlib.suppress(asyncio.QueueFull):  # the stream asks again as long as it needs to
                self._asks.put_nowait(ask)

    async def _fetch_forever(self) -> None:
        while True:
            ask = await self._asks.get()
            if self._replay is None:  # an engine that keeps no history: what was missed stays missed
                if ask.kind is AskKind.REPLAY:
                    self._take(self._stream.replay_ended())
                continue
            try:
                with self._open(zmq.DEALER, self._replay) as socket:
                    if ask.kind is AskKind.REPLAY:
                        await self._fetch_replay(socket, ask.from_sequence)
                    else:
                        await self._fetch_snapshot(socket)
            except TimeoutError:
                _log.info("no answer", ask=ask.kind.value, address=self._replay)
                if ask.kind is AskKind.REPLAY:
                    self._take(self._stream.replay_ended())

    async def _fetch_replay(self, socket: zmq.asyncio.Socket, start: int) -> None:
        await socket.send_multipart([b"", wire.encode_sequence(start)])
        while True:
            sequence, payload = await self._receive(socket)
            if sequence == _END:
                break
            self._take(self._stream.replayed(sequence, payload, self._clock()))
        self._take(self._stream.replay_ended())

    async def _fetch_snapshot(self, socket: zmq.asyncio.Socket) -> None:
        await socket.send_multipart([b"", wire.SNAPSHOT_REQUEST])
        payloads: list[bytes] = []
        while True:
            sequence, payload = await self._receive(socket)
            if sequence == _END:
                break
            payloads.append(payload)
        try:
            end = wire.decode_snapshot_end(payload)
        except msgspec.MsgspecError:
            return  # an engine that took the request for something else
        now = self._clock()
        asks = self._stream.snapshot(payloads, resume_sequence=end.resume_sequence, epoch=end.epoch, now=now)
        self._take(asks)

    async def _receive(self, socket: zmq.asyncio.Socket) -> tuple[int, bytes]:
        """One message of an answer: `[topic, seq, payload]`, or `[seq, payload]` from older engines."""
        async with asyncio.timeout(_FETCH_SECONDS):
            while True:
                frames = [frame for frame in await socket.recv_multipart() if isinstance(frame, bytes)]
                if frames and frames[0] == b"":
                    frames = frames[1:]
                if len(frames) in {2, 3} and len(frames[-2]) == 8:
                    return int.from_bytes(frames[-2], "big"), frames[-1]

    def _open(self, kind: int, address: str) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, _RECEIVE_MESSAGES)
        socket.connect(address)
        return socket


class EventReaders:
    """One reader for every engine of ours, and for every other one whose addresses a flag names."""

    def __init__(self, fleet: Fleet, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._clock = clock
        self._tasks: dict[tuple[str, str, str], asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Start and end readers as replicas come and go, until cancelled."""
        context = zmq.asyncio.Context()
        try:
            while True:
                self._follow(context)
                await asyncio.sleep(_FOLLOW_SECONDS)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            context.destroy(linger=0)

    def _follow(self, context: zmq.asyncio.Context) -> None:
        wanted = {
            (name, endpoint.uid, endpoint.address): (endpoint, addresses)
            for name, state in self._fleet.pools.items()
            for endpoint in state.router.endpoints
            if (addresses := find_event_addresses(endpoint, self._fleet.find_replica(endpoint.uid)))
        }
        for key in [key for key in self._tasks if key not in wanted]:
            self._tasks.pop(key).cancel()
        for key, (endpoint, addresses) in wanted.items():
            if key not in self._tasks:
                self._tasks[key] = self._start(context, key[0], endpoint, *addresses)

    def _start(
        self,
        context: zmq.asyncio.Context,
        pool: str,
        endpoint: EndpointView,
        live: str,
        replay: str | None,
    ) -> asyncio.Task[None]:
        reader = EventReader(
            context,
            self._fleet.pools[pool].router.index.open_stream(endpoint),
            live=live,
            replay=replay,
            clock=self._clock,
        )
        return asyncio.get_running_loop().create_task(reader.run())


def find_event_addresses(endpoint: EndpointView, replica: Replica | None) -> tuple[str, str | None] | None:
    """Where a replica publishes and where it answers for what was missed; None when nobody told.

    A flag names both. A pod has the contract's ports, once its state or its answers told an epoch: it is ours.
    """
    if replica is not None and replica.static:
        return (replica.events, replica.replay) if replica.events is not None else None
    if endpoint.epoch is None:
        return None
    host = split_address(endpoint.address)[0]
    host = f"[{host}]" if ":" in host else host
    return f"tcp://{host}:{ports.ENGINE_KV_EVENTS}", f"tcp://{host}:{ports.ENGINE_KV_REPLAY}"
