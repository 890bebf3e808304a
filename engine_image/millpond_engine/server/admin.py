"""The operator's port: drain, pause, sleep, caches, aborts, server information. Never reachable for tenants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar, cast

import msgspec
from aiohttp import web

from millpond_common.contract.openai import ErrorCode
from millpond_engine.loop.stream import EndKind, StreamEnd
from millpond_engine.loop.thread import EngineThread, PauseMode
from millpond_engine.server.app import add_probes, make_base_app
from millpond_engine.server.context import CONTEXT, ServerContext
from millpond_engine.server.errors import bad_value, make_error
from millpond_engine.server.intake import parse_body, read_body
from millpond_engine.server.meta import answer_json, make_state
from millpond_engine.server.schema import AbortBody

T = TypeVar("T")
_CALL_SECONDS = 600.0
"""Longest an operator's call waits for the engine thread; waking up loads the model."""


def make_admin_app(context: ServerContext) -> web.Application:
    """Application of the admin port."""
    app = make_base_app(context)
    add_probes(app)
    for path in ("/drain",):
        app.router.add_post(path, handle_drain)
    for path in ("/pause", "/pause_generation"):
        app.router.add_post(path, handle_pause)
    for path in ("/resume", "/continue_generation"):
        app.router.add_post(path, handle_resume)
    for path in ("/abort_requests", "/abort_request"):
        app.router.add_post(path, handle_abort)
    app.router.add_post("/sleep", handle_sleep)
    app.router.add_post("/wake_up", handle_wake)
    app.router.add_get("/is_sleeping", handle_is_sleeping)
    app.router.add_post("/reset_prefix_cache", handle_reset)
    app.router.add_route("GET", "/flush_cache", handle_reset)
    app.router.add_post("/flush_cache", handle_reset)
    app.router.add_get("/server_info", handle_server_info)
    app.router.add_get("/model_info", handle_model_info)
    for path in ("/start_profile", "/stop_profile"):
        app.router.add_post(path, handle_profile)
    return app


async def handle_drain(request: web.Request) -> web.Response:
    """Begin to drain, as SIGTERM does; answers at once."""
    context = request.app[CONTEXT]
    context.lifecycle.start_drain()
    return answer_json({"status": "draining", "open_requests": context.lifecycle.open_requests})


async def handle_pause(request: web.Request) -> web.Response:
    """Hold new requests; `mode` says what happens to the running ones."""
    mode = request.query.get("mode", "abort")
    if mode not in {"abort", "wait", "keep"}:
        raise bad_value("mode", "must be abort, wait or keep")
    await _call(request, lambda thread: thread.pause(cast("PauseMode", mode)))
    return answer_json({"status": "paused"})


async def handle_resume(request: web.Request) -> web.Response:
    """Go on after a pause."""
    await _call(request, lambda thread: thread.resume())
    return answer_json({"status": "resumed"})


async def handle_sleep(request: web.Request) -> web.Response:
    """Give memory back. Both levels drop weights and cache; waking up reads the model again."""
    if request.query.get("level", "1") not in {"1", "2"}:
        raise bad_value("level", "must be 1 or 2")
    await _call(request, lambda thread: thread.sleep())
    return answer_json({"status": "asleep"})


async def handle_wake(request: web.Request) -> web.Response:
    """Load the model again."""
    await _call(request, lambda thread: thread.wake())
    return answer_json({"status": "awake"})


async def handle_is_sleeping(request: web.Request) -> web.Response:
    """Whether the model is out of memory."""
    return answer_json({"is_sleeping": request.app[CONTEXT].lifecycle.phase == "Asleep"})


async def handle_abort(request: web.Request) -> web.Response:
    """End requests by the ids of their responses, or all of them."""
    context = request.app[CONTEXT]
    body = parse_body(await read_body(request, context.limits), AbortBody)
    wanted = list(body.request_ids or ()) + ([body.rid] if body.rid else [])
    if not wanted and not body.abort_all:
        raise bad_value("request_ids", "name the requests to abort, or set abort_all")
    end = StreamEnd(EndKind.CANCELLED, "the request was aborted by the operator")

    def abort(thread: EngineThread) -> int:
        if body.abort_all:
            return thread.end_requests(None, end)
        live = thread.recorder.ledger.live
        ids = [
            request_id
            for request_id in live
            if request_id in wanted or request_id.rpartition("-")[0] in wanted
        ]
        return thread.end_requests(ids, end)

    return answer_json({"status": "aborted", "num_aborted": await _call(request, abort)})


async def handle_reset(request: web.Request) -> web.Response:
    """Drop cached blocks; not while requests run."""
    success = await _call(request, lambda thread: thread.reset_prefix_cache())
    return answer_json({"success": success})


async def handle_server_info(request: web.Request) -> web.Response:
    """State and configuration."""
    context = request.app[CONTEXT]
    info = {"state": msgspec.to_builtins(make_state(context)), "config": msgspec.to_builtins(context.config)}
    return answer_json(info | {"version": context.version})


async def handle_model_info(request: web.Request) -> web.Response:
    """What SGLang's bench client asks."""
    root = request.app[CONTEXT].model_root
    return answer_json({"model_path": root, "tokenizer_path": root, "is_generation": True})


async def handle_profile(request: web.Request) -> web.Response:
    """Accepted for bench clients; there is no profiler to switch."""
    del request
    return answer_json({"status": "no profiler"})


async def _call(request: web.Request, function: Callable[[EngineThread], T]) -> T:
    """Run on the engine thread and wait.

    Raises:
        RequestError: the engine is not loaded, or does not answer.
    """
    future = request.app[CONTEXT].thread.call(function)
    try:
        async with asyncio.timeout(_CALL_SECONDS):
            return await asyncio.wrap_future(future)
    except TimeoutError as error:
        raise make_error(ErrorCode.OVERLOADED, "the engine thread did not answer in time") from error
    except RuntimeError as error:
        raise make_error(ErrorCode.ASLEEP, str(error)) from error
