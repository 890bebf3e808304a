"""Everything on the tenant port that does not generate: models, tokenizer, health, state, versions."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from aiohttp import web

from millpond_common.contract.engine_state import BlockCounts, EngineState, RequestState, Speeds
from millpond_common.contract.openai import ErrorCode
from millpond_engine.records.request import Request, SamplingParams, StopParams
from millpond_engine.server import checks
from millpond_engine.server.context import CONTEXT, ServerContext
from millpond_engine.server.conversation import render_for_tokenize
from millpond_engine.server.errors import bad_value, make_error
from millpond_engine.server.generation import Generation
from millpond_engine.server.intake import get_now, get_request_id, parse_body, read_body
from millpond_engine.server.prepare import encode_prompt
from millpond_engine.server.schema import DetokenizeBody, TokenizeBody
from millpond_engine.server.sse import encode_json
from millpond_engine.text.tokenizer import decode, describe_token


def answer_json(value: Any, status: int = 200) -> web.Response:
    """A JSON response."""
    return web.Response(body=encode_json(value), status=status, content_type="application/json")


async def handle_models(request: web.Request) -> web.Response:
    """One card for the model and one per adapter."""
    context = request.app[CONTEXT]
    return answer_json({"object": "list", "data": list(_make_cards(context).values())})


async def handle_model(request: web.Request) -> web.Response:
    """One card."""
    card = _make_cards(request.app[CONTEXT]).get(request.match_info["model"])
    if card is None:
        raise make_error(ErrorCode.MODEL_NOT_FOUND, "this model is not served here", param="model")
    return answer_json(card)


def _make_cards(context: ServerContext) -> dict[str, dict[str, Any]]:
    base = context.config.model_name
    cards = {base: _make_card(context, base, parent=None)}
    for adapter in context.config.adapters:
        cards[adapter.name] = _make_card(context, adapter.name, parent=base)
    return cards


def _make_card(context: ServerContext, name: str, *, parent: str | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "millpond",
        "root": context.model_root,
        "parent": parent,
        "max_model_len": context.max_model_tokens,
    }


async def handle_tokenize(request: web.Request) -> web.Response:
    """Tokens of a prompt or of messages."""
    context = request.app[CONTEXT]
    body = parse_body(await read_body(request, context.limits), TokenizeBody)
    context.find_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_value("prompt", "give prompt or messages, one of them")
    loop = asyncio.get_running_loop()
    tokens = await loop.run_in_executor(context.executor, _tokenize, context, body)
    answer = {
        "count": len(tokens),
        "max_model_len": context.max_model_tokens,
        "tokens": tokens,
        "token_strs": None,
    }
    if body.return_token_strs:
        answer["token_strs"] = [describe_token(context.tokenizer, token) for token in tokens]
    return answer_json(answer)


def _tokenize(context: ServerContext, body: TokenizeBody) -> list[int]:
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        return encode_prompt(context, body.prompt, add_special_tokens=special, param="prompt")
    text = render_for_tokenize(body, context)
    return encode_prompt(context, text, add_special_tokens=bool(body.add_special_tokens), param="messages")


async def handle_detokenize(request: web.Request) -> web.Response:
    """Text of tokens."""
    context = request.app[CONTEXT]
    body = parse_body(await read_body(request, context.limits), DetokenizeBody)
    context.find_model(body.model)
    if len(body.tokens) > context.limits.max_detokenized_tokens:
        raise bad_value("tokens", f"at most {context.limits.max_detokenized_tokens} tokens")
    loop = asyncio.get_running_loop()
    text = await loop.run_in_executor(context.executor, _detokenize, context, body.tokens)
    return answer_json({"prompt": text})


def _detokenize(context: ServerContext, tokens: list[int]) -> str:
    checks.check_token_ids("tokens", tokens, context.tokenizer.facts.vocabulary_size)
    return decode(context.tokenizer, tokens, skip_special_tokens=False)


async def handle_health(request: web.Request) -> web.Response:
    """200 while the loop steps; independent of load."""
    health = request.app[CONTEXT].thread.check_health(get_now())
    return web.Response(status=200 if health.healthy else 503, text=health.message)


async def handle_ready(request: web.Request) -> web.Response:
    """200 when a new request would be served now."""
    lifecycle = request.app[CONTEXT].lifecycle
    return web.Response(status=200 if lifecycle.ready else 503, text=lifecycle.phase)


async def handle_ping(_: web.Request) -> web.Response:
    """The process answers."""
    return web.Response(text="pong")


async def handle_version(request: web.Request) -> web.Response:
    """Version of Millpond."""
    return answer_json({"version": request.app[CONTEXT].version})


async def handle_load(request: web.Request) -> web.Response:
    """Open requests."""
    return answer_json({"server_load": request.app[CONTEXT].lifecycle.open_requests})


async def handle_health_generate(request: web.Request) -> web.Response:
    """200 after one token has really been generated."""
    context = request.app[CONTEXT]
    now = get_now()
    probe = Request(
        request_id=f"probe-{get_request_id(request)}-{time.monotonic_ns()}",
        prompt=(context.tokenizer.facts.eos_token_ids or (0,))[:1],
        sampling=SamplingParams(temperature=0.0),
        stop=StopParams(max_tokens=1, ignore_eos=True),
        arrival_seconds=now,
        namespace=(context.config.model_name, "", "", "health probe"),
        class_name=context.config.scheduling.default_class,
    )
    context.lifecycle.open()
    try:
        with Generation(context.thread, [probe], received_at=now, max_unread_tokens=16) as generation:
            async with asyncio.timeout(context.limits.body_seconds):
                while (await generation.get()).end is None:
                    pass
            generation.close(probe.request_id, "length")
    except TimeoutError as error:
        raise make_error(ErrorCode.OVERLOADED, "no token came in time") from error
    finally:
        context.lifecycle.close()
    return web.Response(text="generated")


async def handle_state(request: web.Request) -> web.Response:
    """What gateway and operator need, from the newest snapshot."""
    return web.Response(
        body=msgspec.json.encode(make_state(request.app[CONTEXT])), content_type="application/json"
    )


async def handle_request(request: web.Request) -> web.Response:
    """What this epoch knows about an `x-request-id`."""
    context = request.app[CONTEXT]
    request_id = request.match_info["id"]
    state = RequestState(request_id, context.epoch, context.registry.get_phase(request_id))
    return web.Response(body=msgspec.json.encode(state), content_type="application/json")


def make_state(context: ServerContext) -> EngineState:
    """State of this engine now."""
    snapshot = context.thread.snapshot
    counts, info = snapshot.counts, snapshot.info
    return EngineState(
        epoch=context.epoch,
        model=context.config.model_name,
        phase=context.lifecycle.phase,
        uptime_seconds=get_now() - context.started_at,
        version=context.version,
        block_tokens=info.block_tokens if info else context.config.kv_cache.block_tokens,
        device=BlockCounts(counts.free_blocks, counts.cached_blocks, counts.used_blocks),
        host=BlockCounts(counts.free_host_blocks, 0, counts.used_host_blocks),
        max_model_tokens=context.max_model_tokens,
        num_running=counts.num_running,
        num_waiting=counts.num_waiting,
        running_tokens=counts.running_tokens,
        waiting_tokens=counts.waiting_tokens,
        open_requests=context.lifecycle.open_requests,
        cached_value_tokens=counts.cached_value_tokens,
        speeds=Speeds(
            prefill_tokens_per_second=snapshot.prefill_tokens_per_second,
            decode_tokens_per_second=snapshot.decode_tokens_per_second,
            decode_seconds_per_step=snapshot.decode_seconds_per_step,
        ),
        load_seconds=snapshot.load_seconds,
        kv_events_sequence=context.events_sequence,
        prefix_hit_tokens=counts.prefix_hit_tokens,
    )
