"""Which of the scored candidates: one rule per policy, ties by a seeded generator, never by order or name."""

from __future__ import annotations

from collections.abc import Sequence

from millpond_gateway.routing.cost import compute_tie_band
from millpond_gateway.routing.records import (
    ChoiceReason,
    Drop,
    DropReason,
    EndpointView,
    Policy,
    RequestView,
    Role,
)
from millpond_gateway.routing.score import Score
from millpond_gateway.routing.settings import RevisionWeight, RoutingSettings
from millpond_gateway.routing.splitmix import SplitMix, mix64


class Chooser:
    """State of one pool's choices: the seeded generator and the rotation."""

    def __init__(self, seed: int) -> None:
        self._generator = SplitMix(seed)
        self._last_in_rotation: dict[Role, str] = {}

    def pick(
        self, scores: Sequence[Score], request: RequestView, settings: RoutingSettings
    ) -> tuple[int, ChoiceReason]:
        """Position of the chosen candidate among `scores`, and why."""
        policy = settings.policy
        if policy is Policy.ROUND_ROBIN:
            return self._next_in_rotation(scores, request.role), ChoiceReason.NEXT_IN_ROTATION
        if len(scores) == 1:
            return 0, ChoiceReason.ONLY_CANDIDATE
        if policy is Policy.LEAST_LOADED:
            costs = [score.queue_seconds + score.decode_seconds for score in scores]
        else:
            costs = [score.total_seconds for score in scores]
        lowest = min(costs)
        best = costs.index(lowest)
        band = lowest + compute_tie_band(scores[best], settings)
        ties = [position for position, cost in enumerate(costs) if cost <= band]
        if len(ties) == 1:
            return best, ChoiceReason.LOWEST_COST
        return ties[self._generator.below(len(ties))], ChoiceReason.TIE

    def draw_revision(
        self,
        candidates: list[EndpointView],
        request: RequestView,
        weights: Sequence[RevisionWeight],
    ) -> tuple[list[EndpointView], list[Drop]]:
        """Keep one revision's candidates, drawn by weight; a session always draws the same while weights stay.

        A revision without candidates gives its share to the others; without any weighted candidate all stay.
        """
        if not weights:
            return candidates, []
        available = {endpoint.revision for endpoint in candidates}
        live = [weight for weight in weights if weight.weight > 0 and weight.revision in available]
        if request.revision is not None or not live:
            return candidates, []
        point = self._point(request) * sum(weight.weight for weight in live)
        drawn = live[-1].revision
        for weight in live:
            point -= weight.weight
            if point < 0:
                drawn = weight.revision
                break
        kept = [endpoint for endpoint in candidates if endpoint.revision == drawn]
        dropped = [
            Drop(endpoint.uid, DropReason.WRONG_REVISION)
            for endpoint in candidates
            if endpoint.revision != drawn
        ]
        return kept, dropped

    def _point(self, request: RequestView) -> float:
        if request.session is None:
            return self._generator.uniform()
        return (mix64(request.session) >> 11) * 2.0**-53

    def _next_in_rotation(self, scores: Sequence[Score], role: Role) -> int:
        """The next uid after the last one, in a circle that survives coming and going endpoints."""
        last = self._last_in_rotation.get(role, "")
        uids = [score.uid for score in scores]
        chosen = min((uid for uid in uids if uid > last), default=min(uids))
        self._last_in_rotation[role] = chosen
        return uids.index(chosen)
