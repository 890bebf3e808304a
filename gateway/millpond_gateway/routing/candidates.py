"""Which endpoints may serve a request at all; every one that may not is dropped with a named reason."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from millpond_gateway.routing.records import Drop, DropReason, EndpointView, KeyKind, RequestView, Role


def filter_candidates(
    endpoints: Iterable[EndpointView],
    request: RequestView,
    *,
    ejected: AbstractSet[str] = frozenset(),
    excluded: AbstractSet[str] = frozenset(),
) -> tuple[list[EndpointView], list[Drop]]:
    """Split endpoints into candidates and drops."""
    candidates: list[EndpointView] = []
    drops: list[Drop] = []
    for endpoint in endpoints:
        reason = find_drop_reason(endpoint, request, ejected=ejected, excluded=excluded)
        if reason is None:
            candidates.append(endpoint)
        else:
            drops.append(Drop(endpoint.uid, reason))
    return candidates, drops


def find_drop_reason(
    endpoint: EndpointView,
    request: RequestView,
    *,
    ejected: AbstractSet[str] = frozenset(),
    excluded: AbstractSet[str] = frozenset(),
) -> DropReason | None:
    """First reason that speaks against an endpoint, in the order a reader would check; None for a candidate."""
    if not endpoint.ready:
        return DropReason.NOT_READY
    if endpoint.cordoned:
        return DropReason.CORDONED
    if endpoint.uid in excluded:
        return DropReason.ALREADY_TRIED
    if endpoint.uid in ejected:
        return DropReason.EJECTED
    if not _serves_role(endpoint.role, request.role):
        return DropReason.WRONG_ROLE
    if request.revision is not None and endpoint.revision != request.revision:
        return DropReason.WRONG_REVISION
    if request.adapter and endpoint.adapters is not None and request.adapter not in endpoint.adapters:
        return DropReason.ADAPTER_MISSING
    return None if fits(endpoint, request) else DropReason.CANNOT_FIT


def fits(endpoint: EndpointView, request: RequestView) -> bool:
    """Whether the request alone fits the replica; what is unknown or estimated does not speak against it."""
    if request.prompt.kind is not KeyKind.TOKENS:
        return True
    tokens = request.prompt.num_tokens + 1
    if endpoint.max_model_tokens is not None and tokens > endpoint.max_model_tokens:
        return False
    return endpoint.num_blocks is None or tokens <= endpoint.num_blocks * endpoint.block_tokens


def _serves_role(endpoint: Role, wanted: Role) -> bool:
    return endpoint in {Role.BOTH, wanted}
