"""Small translations between what the relay, the world and the decisions call things."""

from __future__ import annotations

import msgspec

from millpond_gateway.flow.outliers import Evidence, classify_status
from millpond_gateway.flow.records import ClassPolicy
from millpond_gateway.proxy.dispatch import FAULTS, Ending, Outcome, Record
from millpond_gateway.routing.records import EndpointView, Reservation, Usage
from millpond_gateway.routing.settings import RevisionWeight, RoutingSettings
from millpond_gateway.world.records import PoolView as PoolSpec


def make_routing_settings(spec: PoolSpec) -> RoutingSettings:
    """How the pool routes."""
    return RoutingSettings(
        policy=spec.policy,
        price_of_recompute=spec.price_of_recompute,
        model=spec.model,
        revision_weights=tuple(
            RevisionWeight(revision, weight) for revision, weight in spec.revision_weights.items()
        ),
    )


def compute_capacity(view: EndpointView) -> int | None:
    """Tokens of the largest request a replica takes; None when it told no limit."""
    limits = [
        view.max_model_tokens,
        view.num_blocks * view.block_tokens if view.num_blocks is not None else None,
    ]
    return min((limit for limit in limits if limit is not None), default=None)


def make_class_policy(entry: msgspec.Struct) -> ClassPolicy:
    """A traffic class as admission sees it."""
    return msgspec.convert(msgspec.structs.asdict(entry), ClassPolicy)


def judge_attempt(ending: Ending) -> Evidence | None:
    """What an attempt says about its replica; None when it says nothing."""
    if ending.outcome in FAULTS:
        return Evidence.FAULT
    if ending.outcome is Outcome.OVERLOADED:
        return Evidence.OVERLOAD
    if ending.outcome is Outcome.COMPLETED and ending.status is not None:
        return classify_status(ending.status, retry_after=ending.status == 503)
    return None


def count_charged(reservation: Reservation) -> int:
    """What a peer's request is charged; gateways of former versions told no more than they expected."""
    expected = reservation.uncached_tokens + reservation.cached_tokens + reservation.output_tokens
    return reservation.budget_tokens or expected


def estimate_usage(ended: Record | Ending, prompt_tokens: int) -> Usage | None:
    """What a request used whose engine told nothing: the prompt, and a token for each event that came.

    None where no engine was at work, or where one failed before the client got anything.
    """
    left = ended.outcome in {Outcome.CLIENT_LEFT, Outcome.CLIENT_STALLED}
    if not ended.sent or not (ended.num_events or left):
        return None
    return Usage(prompt_tokens=prompt_tokens, output_tokens=ended.num_events)
