"""Rules of choice that the simulator can run: Millpond's own policies and, for comparison, those of others.

Each rule takes the scores that the router computed, so all of them see the same load and the same index. The
foreign rules are simplified re-implementations of published rules; they say nothing about the products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

import msgspec

from millpond_gateway.routing.records import Choice, Policy, RequestView
from millpond_gateway.routing.router import Router
from millpond_gateway.routing.score import Score
from millpond_gateway.routing.splitmix import SplitMix


class Rule(StrEnum):
    """What chooses."""

    ROUND_ROBIN = "RoundRobin"
    LEAST_REQUESTS = "LeastRequests"
    LEAST_LOADED = "LeastLoaded"
    WEIGHTED_SUM = "WeightedSum"
    PREFIX = "Prefix"
    AUTO = "Auto"


POLICIES: dict[Rule, Policy] = {
    Rule.ROUND_ROBIN: Policy.ROUND_ROBIN,
    Rule.LEAST_LOADED: Policy.LEAST_LOADED,
    Rule.PREFIX: Policy.PREFIX,
    Rule.AUTO: Policy.AUTO,
}
"""Rules that the router has itself."""

Ranking = Callable[[Router, RequestView, Sequence[Score]], list[float]]
"""Cost per candidate, lower is better."""


def rank_least_requests(router: Router, _request: RequestView, scores: Sequence[Score]) -> list[float]:
    """Open requests."""
    loads = [router.load.view(score.uid) for score in scores]
    return [float(load.num_prefilling + load.num_decoding) for load in loads]


def rank_weighted_sum(router: Router, request: RequestView, scores: Sequence[Score]) -> list[float]:
    """Prefix share times 3, free queue times 2, free KV times 2, each in [0, 1]; negated."""
    loads = [router.load.view(score.uid) for score in scores]
    longest = max((load.num_prefilling for load in loads), default=0) or 1
    blocks = {endpoint.uid: endpoint.num_blocks or 1 for endpoint in router.endpoints}
    tokens = max(request.prompt.num_tokens, 1)
    return [
        -(
            3.0 * score.cached_tokens / tokens
            + 2.0 * (1.0 - load.num_prefilling / longest)
            + 2.0 * (1.0 - min(load.kv_blocks / blocks[score.uid], 1.0))
        )
        for score, load in zip(scores, loads, strict=True)
    ]


_RANKINGS: dict[Rule, Ranking] = {
    Rule.LEAST_REQUESTS: rank_least_requests,
    Rule.WEIGHTED_SUM: rank_weighted_sum,
}


class Placer:
    """Chooses by one rule with one router's books."""

    def __init__(self, rule: Rule, router: Router, *, seed: int) -> None:
        self._ranking = _RANKINGS.get(rule)
        self._router = router
        self._generator = SplitMix(seed)

    def choose(self, request: RequestView, now: float) -> Choice:
        """The router's choice, or another rule's over the router's scores."""
        choice = self._router.choose(request, now)
        if self._ranking is None or choice.endpoint is None:
            return choice
        costs = self._ranking(self._router, request, choice.scores)
        lowest = min(costs)
        ties = [position for position, cost in enumerate(costs) if cost <= lowest + 1e-9]
        score = choice.scores[ties[self._generator.below(len(ties))]]
        endpoint = next(entry for entry in self._router.endpoints if entry.uid == score.uid)
        return msgspec.structs.replace(choice, endpoint=endpoint, score=score)
