"""Proof that an engine had not started a request, or that the process which had is gone."""

from __future__ import annotations

from urllib.parse import quote

import msgspec

from millpond_common.contract.engine_state import RequestState, parse_engine_state
from millpond_gateway.proxy.connections import Connections
from millpond_gateway.proxy.dispatch import Target
from millpond_gateway.proxy.fetch import Fetched, fetch
from millpond_gateway.proxy.retry import Evidence

_TRIES = 2


async def find_evidence(
    connections: Connections, target: Target, request_id: str, *, timeout_seconds: float
) -> Evidence:
    """Look at a replica whose connection broke before it answered.

    Nothing listening at its address, or another epoch: its process is gone with all it had been sent. The same
    epoch: it has to deny the request id itself. An engine that can tell neither leaves the question open.
    """
    state: Fetched | None = None
    for _ in range(_TRIES):
        try:
            state = await fetch(
                connections, target.endpoint, "/v1/state", timeout_seconds=timeout_seconds, fresh=True
            )
            break
        except ConnectionRefusedError:
            return Evidence.PROCESS_GONE
        except OSError:
            continue  # a connection may break for the reason that broke the request's
    if state is None:
        return Evidence.UNPROVEN
    known = target.endpoint.epoch
    try:
        epoch = parse_engine_state(state.body).epoch
    except msgspec.MsgspecError:
        return Evidence.UNPROVEN
    if known is not None and epoch != known:
        return Evidence.PROCESS_GONE
    return await _ask(connections, target, request_id, epoch, timeout_seconds=timeout_seconds)


async def _ask(
    connections: Connections, target: Target, request_id: str, epoch: str, *, timeout_seconds: float
) -> Evidence:
    told = await _fetch_state(connections, target, request_id, timeout_seconds=timeout_seconds)
    denied = told is not None and told.phase == "Unknown" and told.epoch == epoch
    return Evidence.NOT_STARTED if denied else Evidence.UNPROVEN


async def is_waiting(
    connections: Connections, target: Target, request_id: str, *, timeout_seconds: float
) -> bool:
    """Whether an engine says that a request it was sent waits and has not begun."""
    told = await _fetch_state(connections, target, request_id, timeout_seconds=timeout_seconds)
    return told is not None and told.phase == "Waiting"


async def _fetch_state(
    connections: Connections, target: Target, request_id: str, *, timeout_seconds: float
) -> RequestState | None:
    path = f"/v1/requests/{quote(request_id, safe='')}"
    try:
        answer = await fetch(connections, target.endpoint, path, timeout_seconds=timeout_seconds)
        told = msgspec.json.decode(answer.body, type=RequestState)
    except (OSError, msgspec.MsgspecError):
        return None
    return told if answer.head.status == 200 else None
