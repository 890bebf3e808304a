"""OpenTelemetry: a span for each request, its context passed on, and nothing without an endpoint."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.fixtures.gateway import MODEL, MakeEngine, MakeGateway, Script
from tests.gateway.wire import STREAM_BODY, ask, make_request, parse, talk

from millpond_gateway.app.traces import Tracing, make_tracing

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def test_a_span_tells_the_choice_and_its_context_reaches_the_engine(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    exporter = InMemorySpanExporter()
    engine = await make_engine()
    gateway = await make_gateway(engine, tracing=Tracing(exporter))
    extra = (f"traceparent: {PARENT}", "tracestate: vendor=1")
    answer = parse(await talk(gateway, make_request(STREAM_BODY, extra=extra)))
    assert answer.status == 200
    assert answer.find("x-millpond-decision") == []  # told to the trace, not to the client
    await gateway.process.stop()
    (span,) = exporter.get_finished_spans()
    sent = engine.seen[0].headers
    assert span.context is not None
    assert sent["traceparent"] == f"00-4bf92f3577b34da6a3ce929d0e0e4736-{span.context.span_id:016x}-01"
    assert sent["tracestate"] == "vendor=1"
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == "00f067aa0ba902b7"
    told: dict[str, Any] = dict(span.attributes or {})
    assert told["millpond.pool"] == told["gen_ai.request.model"] == MODEL
    assert told["gen_ai.usage.output_tokens"] == 3
    assert "OnlyCandidate" in told["millpond.decision"]
    assert f"{engine.address}=" in told["millpond.decision"]
    assert [event.name for event in span.events] == ["first byte"]
    assert not any("hello" in str(value) for value in told.values())


async def test_a_failed_request_is_an_error_and_a_new_trace_begins_without_a_parent(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    exporter = InMemorySpanExporter()
    gateway = await make_gateway(
        await make_engine(script=Script(die_before_head=True)), tracing=Tracing(exporter)
    )
    assert (await ask(gateway, make_request(STREAM_BODY, extra=("traceparent: nonsense",)))).status == 502
    await gateway.process.stop()
    (span,) = exporter.get_finished_spans()
    assert span.parent is None
    assert span.status.description == "ReplicaFailed"


async def test_without_traces_a_callers_context_passes_through(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine()
    gateway = await make_gateway(engine)
    await ask(gateway, make_request(extra=(f"traceparent: {PARENT}",)))
    assert engine.seen[0].headers["traceparent"] == PARENT


class Collector(BaseHTTPRequestHandler):
    received: ClassVar[list[tuple[str, bytes]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.received.append((self.path, body))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002 - the name of the base class


async def test_spans_reach_a_collector_over_otlp(
    make_engine: MakeEngine, make_gateway: MakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    try:
        gateway = await make_gateway(await make_engine(), tracing=make_tracing())
        assert (await ask(gateway, make_request())).status == 200
        await gateway.process.stop()
    finally:
        server.shutdown()
        server.server_close()
    ((path, body),) = Collector.received
    assert path == "/v1/traces"
    assert b"millpond.decision" in (gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)


@pytest.mark.parametrize("extra", [{}, {"OTEL_SDK_DISABLED": "true"}])
def test_traces_are_off_unless_an_endpoint_is_named(extra: dict[str, str]) -> None:
    named = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"} if extra else {}
    assert make_tracing({**named, **extra}) is None
    tracing = make_tracing({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"})
    assert tracing is not None


async def test_the_debug_header_breaks_the_score_down(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engines = [await make_engine() for _ in range(2)]
    gateway = await make_gateway(*engines, expose_decisions=True)
    answer = await ask(gateway, make_request())
    assert answer.find("x-millpond-endpoint")[0] in {engine.address for engine in engines}
    (decision,) = answer.find("x-millpond-decision")
    for engine in engines:
        assert f"{engine.address}=" in decision
    for term in ("queue=", "own=", "decode=", "affinity=", "cached="):
        assert decision.count(term) == 2
