"""The one path of every generation: submit, collect, stream or answer whole, close each request once.

The status line of a stream waits for the first news, so a refusal before it still has its HTTP status;
a failure after it is an error event and no `[DONE]`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Protocol

import structlog
from aiohttp import web

from millpond_engine.loop.stream import Delivery
from millpond_engine.server.choices import Choice, ChoicePiece
from millpond_engine.server.context import REQUEST_ID, ServerContext
from millpond_engine.server.generation import Generation, StreamEndedError
from millpond_engine.server.prepare import PreparedCall
from millpond_engine.server.sse import DONE, EventStream, encode_json, encode_message
from millpond_engine.server.usage import make_usage

log = structlog.get_logger(__name__)

_LAST_SECONDS = 2.0
"""Time for a client to take the error that ends its stream."""


class Renderer(Protocol):
    """The form of one endpoint's answers. Indices count choices over all prompts."""

    object_name: str
    chunk_name: str

    def take_prompt(self, first_index: int, delivery: Delivery) -> None:
        """A prompt has been computed; `first_index` is the first of its choices."""
        ...

    def make_chunks(self, index: int, piece: ChoicePiece) -> Iterable[dict[str, Any]]:
        """Choice objects to stream for this piece, each in a chunk of its own."""
        ...

    def collect(self, index: int, piece: ChoicePiece) -> None:
        """Keep a piece for the whole answer."""
        ...

    def make_choice(self, index: int) -> dict[str, Any]:
        """The whole choice."""
        ...

    def get_finish_reason(self, index: int) -> str:
        """How a choice ended, as the client sees it."""
        ...


class Answer:
    """State of one call between its deliveries."""

    def __init__(self, context: ServerContext, call: PreparedCall, renderer: Renderer) -> None:
        self.call = call
        self.renderer = renderer
        self._choices = [Choice(context.tokenizer, call.options.text) for _ in range(call.num_choices)]
        self._positions = {request.request_id: i for i, request in enumerate(call.requests)}
        self._cached = 0
        self._prompts_seen: set[int] = set()

    def take(self, delivery: Delivery) -> list[tuple[int, ChoicePiece]]:
        """Pieces of the choices that a delivery moves, in order."""
        position = self._positions[delivery.request_id]
        first = position * self.call.options.n
        if delivery.prompt is not None and position not in self._prompts_seen:
            self._prompts_seen.add(position)
            self._cached += delivery.prompt.cached_tokens
            self.renderer.take_prompt(first, delivery)
        pieces = []
        for output in delivery.sequences:
            piece = self._choices[first + output.index].push(output)
            if piece is not None:
                pieces.append((first + output.index, piece))
        return pieces

    def get_outcome(self, request_id: str) -> str | None:
        """Outcome of a request once all its choices have ended."""
        first = self._positions[request_id] * self.call.options.n
        indices = range(first, first + self.call.options.n)
        if not all(self._choices[index].ended for index in indices):
            return None
        reasons = {self.renderer.get_finish_reason(index) for index in indices}
        return next(reason for reason in ("tool_calls", "length", "stop") if reason in reasons)

    def has_ended(self, request_id: str, index: int) -> bool:
        """Whether one choice of a request has ended."""
        return self._choices[self._positions[request_id] * self.call.options.n + index].ended

    def make_usage(self) -> dict[str, Any]:
        """Token counts so far."""
        return make_usage(
            prompt_tokens=sum(len(request.prompt) for request in self.call.requests),
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            cached_tokens=self._cached,
        )

    def make_envelope(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The object around choices."""
        options = self.call.options
        return {
            "id": options.id,
            "object": name,
            "created": options.created,
            "model": options.model,
            "choices": choices,
        }

    def make_chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        """One streamed object."""
        chunk = self.make_envelope(self.renderer.chunk_name, [choice])
        if self.call.options.continuous_usage:
            chunk["usage"] = self.make_usage()
        return chunk


async def answer_call(
    context: ServerContext, request: web.Request, call: PreparedCall, renderer: Renderer
) -> web.StreamResponse:
    """Run a prepared call and answer it in the way it asked for.

    Raises:
        RequestError: refused or failed before the status line.
    """
    answer = Answer(context, call, renderer)
    if call.options.stream:
        return await _StreamedAnswer(context, request, answer).run()
    return await _answer_whole(context, request, answer)


def _submit(context: ServerContext, call: PreparedCall) -> Generation:
    return Generation(
        context.thread,
        call.requests,
        received_at=call.received_at,
        max_unread_tokens=context.limits.max_unread_tokens,
        running=context.lifecycle.running,
    )


async def _answer_whole(context: ServerContext, request: web.Request, answer: Answer) -> web.Response:
    with _submit(context, answer.call) as generation:
        while generation.open:
            delivery = await generation.get()
            context.registry.start(request[REQUEST_ID])
            for index, piece in answer.take(delivery):
                answer.renderer.collect(index, piece)
            _close_when_done(generation, answer, delivery)
    choices = [answer.renderer.make_choice(index) for index in range(answer.call.num_choices)]
    body = answer.make_envelope(answer.renderer.object_name, choices)
    body["usage"] = answer.make_usage()
    response = web.Response(body=encode_json(body), content_type="application/json")
    try:
        async with asyncio.timeout(context.limits.slow_reader_seconds):
            await response.prepare(request)  # sent here, so that the request counts as open until it is
            await response.write_eof()
    except TimeoutError:
        _cut(request, answer.call)
    return response


def _cut(request: web.Request, call: PreparedCall) -> None:
    """Drop the connection of a client that takes nothing."""
    log.info("slow reader cut", call=call.options.id)
    if request.transport is not None:
        request.transport.abort()


def _close_when_done(generation: Generation, answer: Answer, delivery: Delivery) -> None:
    """Close a request whose choices have all ended; else stop those that their text has ended."""
    outcome = answer.get_outcome(delivery.request_id)
    if outcome is not None:
        generation.close(delivery.request_id, outcome)
        return
    for output in delivery.sequences:
        if output.finish is None and answer.has_ended(delivery.request_id, output.index):
            generation.stop_choice(delivery.request_id, output.index)


class _StreamedAnswer:
    """One answer over server-sent events."""

    def __init__(self, context: ServerContext, request: web.Request, answer: Answer) -> None:
        self._context = context
        self._request = request
        self._answer = answer
        self._events: EventStream | None = None

    async def run(self) -> web.StreamResponse:
        """Stream until the end, or end with an error event."""
        try:
            await self._generate()
        except StreamEndedError as error:
            if self._events is None:
                raise
            await self._events.end(error.error.to_event())
        except TimeoutError:
            _cut(self._request, self._answer.call)
        assert self._events is not None
        return self._events.response

    async def _generate(self) -> None:
        answer = self._answer
        with _submit(self._context, answer.call) as generation:
            generation.when_broken(self._hurry)
            while generation.open:
                delivery = await generation.get()
                chunks = [
                    encode_message(answer.make_chunk(choice))
                    for index, piece in answer.take(delivery)
                    for choice in answer.renderer.make_chunks(index, piece)
                ]
                if chunks:
                    await self._write(b"".join(chunks))
                _close_when_done(generation, answer, delivery)
        await self._finish()

    def _hurry(self) -> None:
        """The engine has given the request up: a client that takes nothing is not waited for as long as before."""
        if self._events is not None:
            self._events.hurry(_LAST_SECONDS)

    async def _write(self, data: bytes) -> None:
        if self._events is None:
            self._context.registry.start(self._request[REQUEST_ID])
            self._events = await EventStream.open(self._request, self._context.limits.slow_reader_seconds)
        await self._events.write(data)

    async def _finish(self) -> None:
        data = DONE
        if self._answer.call.options.include_usage:
            last = self._answer.make_envelope(self._answer.renderer.chunk_name, [])
            last["usage"] = self._answer.make_usage()
            data = encode_message(last) + DONE
        assert self._events is not None
        await self._events.end(data)
