"""OpenTelemetry traces, where an OTLP endpoint is named: one span for each request, with the choice's scores.

The packages are the extra `otel`; without an endpoint nothing of them is imported. The SDK reads its own
variables: endpoint, headers, sampler, service name. The span goes on to the engine as the W3C `traceparent`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import structlog

from millpond_common.version import __version__
from millpond_gateway.proxy.dispatch import FAULTS, Outcome, Record
from millpond_gateway.proxy.headers import TRACE_PARENT, TRACE_STATE
from millpond_gateway.proxy.records import RequestHead

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

_log = structlog.get_logger("traces")
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_FAILED = FAULTS | {Outcome.TOTAL_DEADLINE, Outcome.SHUTDOWN}


class RequestTrace:
    """One request's span, open until its record is there."""

    __slots__ = ("span", "traceparent")

    def __init__(self, span: Span) -> None:
        context = span.get_span_context()
        self.span = span
        self.traceparent = (
            f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}".encode()
        )


class Tracing:
    """Makes and ends spans; a thread of the SDK sends them in batches, bounded, and drops what does not fit."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource  # noqa: PLC0415 - optional packages
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        from opentelemetry.trace import SpanKind, StatusCode  # noqa: PLC0415
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
            TraceContextTextMapPropagator,
        )

        name = os.environ.get("OTEL_SERVICE_NAME", "millpond-gateway")
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("millpond_gateway", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._kind, self._failed = SpanKind.SERVER, StatusCode.ERROR

    def begin(self, head: RequestHead) -> RequestTrace:
        """Open a request's span, below the caller's when it names one."""
        carrier = {
            name.decode(): value.decode("latin-1")
            for name in (TRACE_PARENT, TRACE_STATE)
            if (value := head.find(name)) is not None
        }
        context = self._propagator.extract(carrier)
        path = head.path.decode("latin-1")
        return RequestTrace(self._tracer.start_span(f"POST {path}", context=context, kind=self._kind))

    def end(self, trace: RequestTrace, record: Record, pool: str) -> None:
        """Close it with what became of the request."""
        span = trace.span
        if span.is_recording():
            span.set_attributes(make_attributes(record, pool))
            if record.first_byte_seconds is not None:
                seconds = record.first_byte_seconds
                ended_at = time.time_ns()
                began_at = ended_at - int(record.seconds * 1e9)
                span.add_event("first byte", timestamp=began_at + int(seconds * 1e9))
            if record.outcome in _FAILED or record.status >= 500:
                span.set_status(self._failed, record.reason or record.outcome.value)
        span.end()

    def stop(self) -> None:
        """Send what is left, for at most a few seconds."""
        self._provider.shutdown()


def make_attributes(record: Record, pool: str) -> dict[str, Any]:
    """Attributes by OpenTelemetry's names where it has one; nothing of the prompt."""
    usage = record.usage
    attributes: dict[str, Any] = {
        "http.request.method": record.method,
        "url.path": record.path,
        "http.response.status_code": record.status,
        "gen_ai.request.model": record.model,
        "millpond.pool": pool,
        "millpond.request_id": record.request_id,
        "millpond.tenant": record.tenant,
        "millpond.class": record.traffic_class,
        "millpond.endpoint": record.endpoint,
        "millpond.outcome": record.outcome.value,
        "millpond.attempts": record.attempts,
        "millpond.decision": record.decision,
        "millpond.hedged": record.hedged,
    }
    if record.first_byte_seconds is not None:
        attributes["millpond.first_byte_seconds"] = record.first_byte_seconds
    if usage is not None:
        attributes["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = usage.output_tokens
        attributes["millpond.cached_tokens"] = usage.cached_tokens or 0
    return {name: value for name, value in attributes.items() if value != ""}


def make_tracing(environment: Mapping[str, str] = os.environ) -> Tracing | None:
    """Tracing, when an endpoint is named and the packages are there; None otherwise."""
    if (
        not any(environment.get(name) for name in _ENDPOINTS)
        or environment.get("OTEL_SDK_DISABLED") == "true"
    ):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    except ImportError:
        _log.warning("no traces: an OTLP endpoint is named, but the extra `otel` is not installed")
        return None
    return Tracing(OTLPSpanExporter())
