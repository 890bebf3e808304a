"""The two small servers: what they answer, and that nonsense does not hurt them."""

from __future__ import annotations

import asyncio

import pytest

from millpond_operator.loop.health import AdminServer, make_check_route, make_metrics_route
from millpond_operator.loop.metrics import Metrics


async def ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("problem", "status"), [(None, b"200 OK"), ("no list for long", b"503 Service Unavailable")]
)
async def test_a_check_answers_with_what_it_found(problem: str | None, status: bytes) -> None:
    server = AdminServer({"/health": make_check_route(lambda: problem)})
    port = await server.start("127.0.0.1", 0)
    answer = await ask(port, b"GET /health?x=1 HTTP/1.1\r\nhost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert (problem or "ok").encode() in answer
    await server.close()


@pytest.mark.parametrize(
    "request_bytes",
    [b"GET /nothing HTTP/1.1\r\n\r\n", b"POST /health HTTP/1.1\r\n\r\n", b"\x00\xff\r\n\r\n", b"GET\r\n\r\n"],
)
async def test_anything_else_is_not_found(request_bytes: bytes) -> None:
    server = AdminServer({"/health": make_check_route(lambda: None)})
    port = await server.start("127.0.0.1", 0)
    assert (await ask(port, request_bytes)).startswith(b"HTTP/1.1 404")
    await server.close()


async def test_an_endless_head_is_cut_off() -> None:
    server = AdminServer({"/health": make_check_route(lambda: None)})
    port = await server.start("127.0.0.1", 0)
    assert await ask(port, b"GET /" + b"x" * 100_000) == b""
    assert (await ask(port, b"GET /health HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200")
    await server.close()


async def test_metrics_start_at_zero() -> None:
    metrics = Metrics()
    metrics.observe_call("get", "Pod", 200, 0.01)
    server = AdminServer({"/metrics": make_metrics_route(metrics.registry)})
    port = await server.start("127.0.0.1", 0)
    text = (await ask(port, b"GET /metrics HTTP/1.1\r\n\r\n")).decode()
    assert 'millpond_operator_reconciles_total{result="Error"} 0.0' in text
    assert 'millpond_operator_api_requests_total{code="200",kind="Pod",verb="get"} 1.0' in text
    await server.close()
