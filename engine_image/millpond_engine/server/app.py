"""The tenant port: routes, the headers of every response, and errors in one shape."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog
from aiohttp import web

from millpond_common.contract import headers
from millpond_common.contract.openai import ApiError, ErrorCode
from millpond_engine.server import meta
from millpond_engine.server.chat import handle_chat
from millpond_engine.server.completions import handle_completions
from millpond_engine.server.context import CONTEXT, REQUEST_ID, ServerContext
from millpond_engine.server.errors import RequestError
from millpond_engine.server.exposition import handle_metrics
from millpond_engine.server.generation import StreamEndedError
from millpond_engine.server.intake import get_request_id
from millpond_engine.server.protocol import EngineProtocol

log = structlog.get_logger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
GENERATING = ("/v1/completions", "/v1/chat/completions")


def make_tenant_app(context: ServerContext) -> web.Application:
    """Application of the tenant port."""
    app = _make_app(context)
    app.middlewares.append(_count_open)
    app.router.add_post("/v1/completions", handle_completions)
    app.router.add_post("/v1/chat/completions", handle_chat)
    app.router.add_get("/v1/models", meta.handle_models)
    app.router.add_get("/v1/models/{model:.+}", meta.handle_model)
    app.router.add_post("/tokenize", meta.handle_tokenize)
    app.router.add_post("/detokenize", meta.handle_detokenize)
    app.router.add_get("/health_generate", meta.handle_health_generate)
    add_probes(app)
    return app


def add_probes(app: web.Application) -> None:
    """What both ports answer."""
    app.router.add_get("/health", meta.handle_health)
    app.router.add_get("/ready", meta.handle_ready)
    app.router.add_get("/metrics", handle_metrics)
    app.router.add_get("/v1/state", meta.handle_state)
    app.router.add_get("/v1/requests/{id:.+}", meta.handle_request)
    app.router.add_get("/version", meta.handle_version)
    app.router.add_get("/load", meta.handle_load)
    app.router.add_get("/ping", meta.handle_ping)


def make_base_app(context: ServerContext) -> web.Application:
    """An application with error shape and headers, without routes."""
    return _make_app(context)


def _make_app(context: ServerContext) -> web.Application:
    app = web.Application(client_max_size=context.limits.max_body_bytes, middlewares=[_shape_errors])
    app[CONTEXT] = context
    app.on_response_prepare.append(_add_headers)
    return app


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Request id and epoch on every response, streams and errors included."""
    if isinstance(request.protocol, EngineProtocol):
        request.protocol.begin_answer()
    set_common_headers(
        response, request.get(REQUEST_ID) or get_request_id(request), request.app[CONTEXT].epoch
    )
    if request.path in GENERATING:
        asked = request.headers.get(headers.CLASS) or ""
        response.headers[headers.CLASS] = request.app[CONTEXT].thread.recorder.label_class(asked)


def set_common_headers(response: web.StreamResponse, request_id: str, epoch: str) -> None:
    """What every response says."""
    response.headers[headers.REQUEST_ID] = request_id
    response.headers[headers.EPOCH] = epoch
    response.headers["Server"] = "millpond"


@web.middleware
async def _shape_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn whatever goes wrong before the status line into an OpenAI error."""
    request[REQUEST_ID] = get_request_id(request)
    protocol = request.protocol if isinstance(request.protocol, EngineProtocol) else None
    if protocol is not None:
        protocol.serve(request)
    try:
        return await handler(request)
    except RequestError as error:
        _book_refusal(request, error)
        return make_error_response(error.error)
    except web.HTTPException as error:
        return make_error_response(_translate_http(error, request))
    except ConnectionError:
        raise
    except Exception:
        log.exception("handler failed", path=request.path, request_id=request[REQUEST_ID])
        return make_error_response(
            ApiError(ErrorCode.ENGINE_ERROR, "the engine failed to handle the request")
        )


@web.middleware
async def _count_open(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count generating requests in and out; refuse them while they cannot be served."""
    if request.path not in GENERATING or request.method != "POST":
        return await handler(request)
    context, request_id = request.app[CONTEXT], request[REQUEST_ID]
    context.lifecycle.open()
    context.registry.open(request_id)
    try:
        return await handler(request)
    finally:
        context.registry.close(request_id)
        context.lifecycle.close()


def make_error_response(error: ApiError) -> web.Response:
    """Status, body and retry headers of an error."""
    response = web.Response(body=error.to_json(), status=error.status, content_type="application/json")
    if error.retry_after_seconds is not None:
        response.headers["retry-after"] = str(error.retry_after_seconds)
    if error.code is ErrorCode.NOT_IMPLEMENTED:
        response.headers["x-should-retry"] = "false"
    response.headers[headers.REASON] = error.code.value
    return response


def _book_refusal(request: web.Request, error: RequestError) -> None:
    """Count a refusal that never reached the engine thread; that thread counts its own."""
    if request.path in GENERATING and not isinstance(error, StreamEndedError):
        context = request.app[CONTEXT]
        class_name = request.headers.get(headers.CLASS) or context.config.scheduling.default_class
        tenant = request.headers.get(headers.TENANT) or ""
        code = error.error.code.value
        context.thread.call(lambda thread: thread.recorder.refuse(class_name, tenant, code))


def _translate_http(error: web.HTTPException, request: web.Request) -> ApiError:
    if isinstance(error, web.HTTPMethodNotAllowed):
        return ApiError(ErrorCode.METHOD_NOT_ALLOWED, f"{request.method} is not served on this path")
    if isinstance(error, web.HTTPNotFound):
        return ApiError(ErrorCode.NOT_FOUND, "no such path on this port")
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return ApiError(ErrorCode.PAYLOAD_TOO_LARGE, "the body is too large")
    if error.status >= 500:
        return ApiError(ErrorCode.ENGINE_ERROR, "the engine failed to handle the request")
    return ApiError(ErrorCode.INVALID_VALUE, "the request could not be read")
