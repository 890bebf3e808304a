"""A request served by a pair: one replica computes the prompt, another generates. What to do when a leg fails.

The legs belong together: a failing one aborts the other, a decode leg never runs alone on nothing, and the pair
falls back to aggregated serving, where one replica does both.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

_STREAM_FIELDS = ("stream", "stream_options")
_LENGTH_FIELDS = ("max_completion_tokens", "max_tokens", "min_tokens", "n", "best_of")


class Leg(StrEnum):
    """Half of a pair."""

    PREFILL = "Prefill"
    DECODE = "Decode"


class PairAction(StrEnum):
    """What to do next."""

    RUN_PAIR = "RunPair"
    RUN_AGGREGATED = "RunAggregated"
    RETRY_PREFILL = "RetryPrefill"
    """Another prefill replica; the decode leg has not begun."""
    FAIL = "Fail"


class PairPlan(msgspec.Struct, frozen=True):
    """The action, and the leg to abort first."""

    action: PairAction
    abort: Leg | None = None


class PairView(msgspec.Struct, frozen=True, kw_only=True):
    """What is available to a paired request of one pool and revision."""

    num_prefill: int
    """Prefill replicas that are routable and not tried."""
    num_decode: int
    can_aggregate: bool
    """Some routable replica computes and generates: role Both, or a decode replica that may prefill."""
    prefill_attempts: int = 0
    max_prefill_attempts: int = 2
    answer_began: bool = False
    """The client has received a byte."""


def plan_pair(view: PairView) -> PairPlan:
    """How to start: as a pair when both legs have a replica, aggregated when only that is possible."""
    if view.num_prefill > 0 and view.num_decode > 0:
        return PairPlan(PairAction.RUN_PAIR)
    return PairPlan(PairAction.RUN_AGGREGATED if view.can_aggregate else PairAction.FAIL)


def plan_leg_failure(view: PairView, failed: Leg) -> PairPlan:
    """What to do when a leg failed to connect, answered an error, or died."""
    other = Leg.DECODE if failed is Leg.PREFILL else Leg.PREFILL
    if view.answer_began:
        return PairPlan(PairAction.FAIL, other)
    if failed is Leg.PREFILL and view.num_prefill > 0 and view.prefill_attempts < view.max_prefill_attempts:
        return PairPlan(PairAction.RETRY_PREFILL, other)
    return PairPlan(PairAction.RUN_AGGREGATED if view.can_aggregate else PairAction.FAIL, other)


def make_prefill_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Body of the prefill leg: a plain request for one token, so that it ends when the prompt is computed."""
    removed = {*_STREAM_FIELDS, *_LENGTH_FIELDS}
    sanitised = {name: value for name, value in body.items() if name not in removed}
    return {**sanitised, "max_tokens": 1, "stream": False}
