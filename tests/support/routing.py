"""Builders of endpoints, requests and routers for tests of routing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from millpond_common.contract.blockkey import KeyScope, compute_block_keys
from millpond_gateway.routing.records import (
    EndpointView,
    KeyKind,
    PromptKeys,
    RequestView,
    Reservation,
)
from millpond_gateway.routing.router import Router
from millpond_gateway.routing.settings import RoutingSettings
from millpond_gateway.routing.splitmix import mix64

BLOCK = 16


def make_endpoint(uid: str, **fields: Any) -> EndpointView:
    defaults: dict[str, Any] = {
        "pod": uid,
        "address": f"{uid}:8000",
        "ready": True,
        "block_tokens": BLOCK,
        "num_blocks": 100_000,
    }
    return EndpointView(uid=uid, **{**defaults, **fields})


def make_endpoints(count: int, **fields: Any) -> list[EndpointView]:
    return [make_endpoint(f"u{number}", **fields) for number in range(count)]


def make_router(endpoints: int | Iterable[EndpointView] = 4, *, seed: int = 1, **settings: Any) -> Router:
    router = Router("pool", RoutingSettings(**settings), seed=seed)
    router.update_endpoints(make_endpoints(endpoints) if isinstance(endpoints, int) else endpoints)
    return router


def make_keys(*parts: tuple[int, int]) -> list[int]:
    """Chained keys of a prompt put together from (content, number of blocks) parts."""
    keys: list[int] = []
    parent = 1
    for content, count in parts:
        keys += _chain(parent, content, count)
        parent = keys[-1] if keys else parent
    return keys


@lru_cache(maxsize=1000)
def _chain(parent: int, content: int, count: int) -> list[int]:
    keys: list[int] = []
    for position in range(count):
        parent = mix64((parent * 31 + content * 1_000_003 + position) & 0xFFFFFFFFFFFFFFFF)
        keys.append(parent)
    return keys


def make_request(
    keys: Sequence[int] = (), *, tokens: int | None = None, name: str = "r", **fields: Any
) -> RequestView:
    num_tokens = tokens if tokens is not None else len(keys) * BLOCK + 1
    kind = KeyKind.TOKENS if keys else KeyKind.NONE
    prompt = PromptKeys(keys=keys, tokens_per_key=float(BLOCK), num_tokens=num_tokens, kind=kind)
    return RequestView(request_id=name, prompt=prompt, **fields)


def make_cold(number: int, tokens: int, **fields: Any) -> RequestView:
    """A request that shares nothing with any other."""
    return make_request(make_keys((1000 + number, tokens // BLOCK)), tokens=tokens, **fields)


def place(router: Router, request: RequestView, now: float = 0.0) -> Reservation:
    return router.reserve(request, router.choose(request, now), now)


def place_all(router: Router, requests: Iterable[RequestView], now: float = 0.0) -> list[Reservation]:
    return [place(router, request, now) for request in requests]


def count_picks(reservations: Iterable[Reservation]) -> Counter[str]:
    return Counter(reservation.uid for reservation in reservations)


def spread_of_load(router: Router) -> float:
    """Largest over mean load in uncached tokens."""
    loads = [router.load.view(endpoint.uid).queued_tokens for endpoint in router.endpoints]
    return max(loads) * len(loads) / sum(loads)


def chi_squared(counts: Iterable[int]) -> float:
    values = list(counts)
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 / mean for value in values)


CHI_SQUARED_99 = {7: 18.48, 30: 50.89}
"""Critical values at p = 0.01 by degrees of freedom."""


def make_tokens(seed: int, count: int) -> list[int]:
    return [mix64(seed * 7919 + position) % 50_000 for position in range(count)]


def token_keys(tokens: Sequence[int], **scope: Any) -> list[int]:
    return compute_block_keys(make_scope(**scope), tokens)


def make_scope(**fields: Any) -> KeyScope:
    return KeyScope(**{"model": "m", "block_tokens": BLOCK, **fields})


def pack_event_batch(events: list[Any], rank: int = 0) -> bytes:
    return msgspec.msgpack.encode([1.0, events, rank])
