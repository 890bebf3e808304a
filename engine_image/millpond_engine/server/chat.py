"""`POST /v1/chat/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from millpond_engine.loop.stream import Delivery
from millpond_engine.records.step import TokenLogprobs
from millpond_engine.server.answer import answer_call
from millpond_engine.server.binding import bind_grammar
from millpond_engine.server.choices import ChoicePiece, TokenEntry
from millpond_engine.server.context import CONTEXT, ServerContext
from millpond_engine.server.conversation import ToolPlan, plan_tools, render_conversation
from millpond_engine.server.errors import bad_value
from millpond_engine.server.intake import Caller, get_now, parse_body, read_body, read_caller
from millpond_engine.server.logprobs import MAX_LOGPROBS, LogprobWriter, make_prompt_logprobs
from millpond_engine.server.prepare import (
    LengthRule,
    PreparedCall,
    encode_prompt,
    make_options,
    make_requests,
    truncate,
)
from millpond_engine.server.schema import ChatBody
from millpond_engine.server.toolgrammar import constrain_chat
from millpond_engine.text.tokenizer import Tokenizer
from millpond_engine.text.toolcalls import CallFound, Event, ToolCallParser


async def handle_chat(request: web.Request) -> web.StreamResponse:
    """Serve one chat call."""
    context = request.app[CONTEXT]
    body = parse_body(await read_body(request, context.limits), ChatBody)
    now = get_now()
    caller = read_caller(request, default_class=context.config.scheduling.default_class, now=now)
    loop = asyncio.get_running_loop()
    call, plan = await loop.run_in_executor(context.executor, prepare, context, body, caller, now)
    call = await bind_grammar(context, call, tenant=caller.tenant)
    return await answer_call(context, request, call, ChatRenderer(context.tokenizer, call, plan))


def prepare(
    context: ServerContext, body: ChatBody, caller: Caller, received_at: float
) -> tuple[PreparedCall, ToolPlan]:
    """Check, render and tokenize; runs off the event loop.

    Raises:
        RequestError: naming the field.
    """
    options = make_options(context, body, prefix="chatcmpl", num_logprobs=_get_num_logprobs(body))
    plan = plan_tools(body, context)
    constraint = constrain_chat(body, plan, context.limits, has_grammars=context.grammars is not None)
    rule = _make_rule(context, body)
    text = render_conversation(body, context, plan)
    tokens = encode_prompt(
        context, text, add_special_tokens=bool(body.add_special_tokens), param=rule.prompt_param
    )
    tokens = truncate(tokens, body, context.max_model_tokens)
    call = make_requests(
        context,
        body,
        options,
        [tokens],
        caller=caller,
        rule=rule,
        received_at=received_at,
        num_prompt_logprobs=options.num_prompt_logprobs,
    )
    return replace(call, constraint=constraint), plan


def _get_num_logprobs(body: ChatBody) -> int | None:
    top = body.top_logprobs or 0
    if not 0 <= top <= MAX_LOGPROBS:
        raise bad_value("top_logprobs", f"must be between 0 and {MAX_LOGPROBS}")
    if top and not body.logprobs:
        raise bad_value("top_logprobs", "needs logprobs: true")
    return top if body.logprobs else None


def _make_rule(context: ServerContext, body: ChatBody) -> LengthRule:
    newer = body.max_completion_tokens is not None
    wanted = body.max_completion_tokens if newer else body.max_tokens
    param = "max_completion_tokens" if newer else "max_tokens"
    if wanted is not None and wanted < 1:
        raise bad_value(param, "must be at least 1")
    return LengthRule(wanted, context.config.default_output_tokens, param, "messages")


@dataclass(slots=True)
class _State:
    """What has been rendered of one choice."""

    parser: ToolCallParser | None
    begun: bool = False
    texts: list[str] = field(default_factory=list)
    calls: list[CallFound] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChatRenderer:
    """Choices of the chat endpoint."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, call: PreparedCall, plan: ToolPlan) -> None:
        self._tokenizer = tokenizer
        self._call = call
        self._options = call.options
        self._writer = LogprobWriter(
            tokenizer, call.options.num_logprobs or 0, as_ids=call.options.tokens_as_ids
        )
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._states = [
            _State(
                ToolCallParser(prefix=plan.forced_prefix, max_calls=plan.max_calls) if plan.parse else None
            )
            for _ in range(call.num_choices)
        ]

    def take_prompt(self, first_index: int, delivery: Delivery) -> None:
        """Keep the prompt's log-probabilities."""
        assert delivery.prompt is not None
        self._prompt_logprobs = delivery.prompt.prompt_logprobs

    def make_chunks(self, index: int, piece: ChoicePiece) -> Iterable[dict[str, Any]]:
        """Role, then text and calls, then the end."""
        state = self._states[index]
        if not state.begun:
            state.begun = True
            yield _make_delta(index, {"role": "assistant", "content": ""})
        events = self._split(state, piece)
        text = "".join(event for event in events if isinstance(event, str))
        extras = self._make_extras(piece)
        if text or extras:
            yield _make_delta(index, {"content": text}) | extras
        for event in events:
            if isinstance(event, CallFound):
                yield from self._make_call_chunks(index, event)
        if piece.finish_reason is not None:
            end = _make_delta(index, {})
            end["finish_reason"], end["stop_reason"] = state.finish_reason, state.stop_reason
            yield end

    def collect(self, index: int, piece: ChoicePiece) -> None:
        """Keep text, calls and entries."""
        state = self._states[index]
        for event in self._split(state, piece):
            if isinstance(event, str):
                state.texts.append(event)
            else:
                state.calls.append(event)
        state.entries.extend(piece.entries)

    def make_choice(self, index: int) -> dict[str, Any]:
        """The whole choice."""
        state = self._states[index]
        content = "".join(state.texts)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if state.calls:
            message["content"] = content if content.strip() else None
            message["tool_calls"] = [_make_call(call) for call in state.calls]
        choice = {
            "index": index,
            "message": message,
            "logprobs": None if self._options.num_logprobs is None else self._writer.make_chat(state.entries),
            "finish_reason": state.finish_reason,
            "stop_reason": state.stop_reason,
        }
        if self._options.return_token_ids:
            choice["token_ids"] = [entry.token for entry in state.entries]
        if self._options.num_prompt_logprobs is not None:
            prompt = self._call.requests[0].prompt
            choice["prompt_logprobs"] = make_prompt_logprobs(
                self._tokenizer, prompt, self._prompt_logprobs, self._options.num_prompt_logprobs
            )
        return choice

    def get_finish_reason(self, index: int) -> str:
        """How the choice ended."""
        return self._states[index].finish_reason or "stop"

    def _split(self, state: _State, piece: ChoicePiece) -> list[Event]:
        """Text and calls in a piece; notes the end."""
        if state.parser is None:
            events: list[Event] = [piece.text] if piece.text else []
        else:
            events = state.parser.push(piece.text)
        if piece.finish_reason is not None:
            if state.parser is not None:
                events.extend(state.parser.flush())
            called = state.parser is not None and state.parser.num_calls > 0
            state.finish_reason = (
                "tool_calls" if called and piece.finish_reason == "stop" else piece.finish_reason
            )
            state.stop_reason = piece.stop_reason
        return events

    def _make_extras(self, piece: ChoicePiece) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if piece.entries and self._options.num_logprobs is not None:
            extras["logprobs"] = self._writer.make_chat(piece.entries)
        if piece.entries and self._options.return_token_ids:
            extras["token_ids"] = [entry.token for entry in piece.entries]
        return extras

    def _make_call_chunks(self, index: int, call: CallFound) -> Iterable[dict[str, Any]]:
        first = {"index": call.index, **_make_call(call)}
        first["function"] = {"name": call.name, "arguments": ""}
        yield _make_delta(index, {"tool_calls": [first]})
        rest = {"index": call.index, "function": {"arguments": call.arguments}}
        yield _make_delta(index, {"tool_calls": [rest]})


def _make_delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _make_call(call: CallFound) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
