"""One real one-token request to one replica, through the gateway's own data port."""

from __future__ import annotations

import asyncio
import time

import msgspec

from millpond_common.contract.gateway_report import ProbeRequest, ProbeResult
from millpond_gateway.proxy import headers

_MAX_ANSWER_BYTES = 1024 * 1024
_MAX_SECONDS = 300.0


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Answer(msgspec.Struct):
    usage: _Usage | None = None
    choices: list[msgspec.Raw] = []


async def probe(
    request: ProbeRequest, *, model: str | None, address: tuple[str, int], secret: str
) -> ProbeResult:
    """Send the request as a client would, pinned to the replica, and judge the answer."""
    began = time.monotonic()
    if model is None:
        return ProbeResult(False, None, f"this gateway knows no pool {request.pool!r}", 0.0)
    try:
        async with asyncio.timeout(min(_MAX_SECONDS, request.timeout_seconds)):
            status, body = await _send(model, address, f"{secret}/{request.pod_uid}")
    except TimeoutError:
        return ProbeResult(
            False, None, f"no answer within {request.timeout_seconds:g} s", time.monotonic() - began
        )
    except (OSError, ValueError) as error:
        return ProbeResult(False, None, f"the gateway's data port failed: {error}", time.monotonic() - began)
    ok, message = judge(status, body)
    return ProbeResult(ok, status, message, time.monotonic() - began)


def judge(status: int, body: bytes) -> tuple[bool, str]:
    """Whether an answer holds a generated token."""
    if status != 200:
        return False, body[:500].decode("utf-8", "replace")
    try:
        answer = msgspec.json.decode(body, type=_Answer)
    except msgspec.MsgspecError as error:
        return False, f"the replica's answer is no completion: {error}"
    if answer.usage is not None and answer.usage.completion_tokens < 1:
        return False, "the replica answered without generating a token"
    if not answer.choices:
        return False, "the replica answered without a choice"
    return True, "the replica answered a real request"


async def _send(model: str, address: tuple[str, int], pin: str) -> tuple[int, bytes]:
    body = msgspec.json.encode({"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0})
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: probe\r\nconnection: close\r\ncontent-type: application/json\r\n"
        f"{headers.PIN.decode()}: {pin}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(*address, limit=_MAX_ANSWER_BYTES)
    try:
        writer.write(head.encode() + body)
        answer_head = await reader.readuntil(b"\r\n\r\n")
        status = int(answer_head.split(b" ", 2)[1])
        raw = await reader.read(_MAX_ANSWER_BYTES)
        while chunk := await reader.read(_MAX_ANSWER_BYTES - len(raw)):
            raw += chunk
    finally:
        writer.close()
    return status, unframe(raw) if b"transfer-encoding: chunked" in answer_head.lower() else raw


def unframe(raw: bytes) -> bytes:
    """Payload of a complete chunked body.

    Raises:
        ValueError: it is not complete.
    """
    payload, at = b"", 0
    while True:
        line_end = raw.index(b"\r\n", at)
        size = int(raw[at:line_end], 16)
        if size == 0:
            return payload
        payload += raw[line_end + 2 : line_end + 2 + size]
        at = line_end + 2 + size + 2
