"""Records of finished requests, for the access log, the metrics and whoever settles accounts."""

from __future__ import annotations

from millpond_gateway.proxy.dispatch import Call, Outcome, Record
from millpond_gateway.proxy.reply import Reply
from millpond_gateway.routing.records import Usage


def make_record(
    call: Call,
    reply: Reply,
    *,
    method: bytes,
    traffic_class: str,
    endpoint: str,
    outcome: Outcome,
    reason: str,
    attempts: int,
    seconds: float,
    first_byte_at: float | None,
    bytes_in: int,
    usage: Usage | None,
    sent: bool,
    hedged: str,
    decision: str,
) -> Record:
    """Everything that is kept of a request: nothing of its prompt or its answer."""
    return Record(
        request_id=call.request_id,
        method=method.decode("latin-1"),
        path=call.path,
        model=call.body.model,
        tenant=call.caller.tenant,
        traffic_class=traffic_class,
        endpoint=endpoint,
        status=reply.status,
        outcome=outcome,
        reason=reason,
        stream=call.body.stream,
        attempts=attempts,
        seconds=seconds,
        first_byte_seconds=first_byte_at - call.arrived_at if first_byte_at is not None else None,
        bytes_in=bytes_in,
        bytes_out=reply.bytes_out,
        usage=usage,
        num_events=reply.num_events,
        sent=sent,
        hedged=hedged,
        decision=decision,
        trace=call.trace,
    )
