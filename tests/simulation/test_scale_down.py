"""Who leaves, judged by what the fleet's caches are worth before and after: the real router over engines in virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from millpond_gateway.routing.splitmix import SplitMix
from millpond_operator.scaling.victim import Candidate, compute_cached_value, rank_victims
from millpond_simulator.engine import EngineModel
from millpond_simulator.fleet import Fleet, FleetSettings, Outcome
from millpond_simulator.trace import BLOCK_TOKENS, TraceRequest

GROW_AT, SHRINK_AT, END_AT = 300.0, 310.0, 380.0
PREFIX_BLOCKS, OWN_BLOCKS = 24, 2
NUM_PREFIXES = 120
"""One of them has 60 % of the traffic."""
MAX_DIP = 3.0
"""Points of the hit rate."""
ENGINE = EngineModel(num_blocks=3_000)


def make_trace(*, per_second: int = 6) -> list[TraceRequest]:
    """Prompts that begin with one of the prefixes and end in blocks of their own."""
    generator, trace, fresh = SplitMix(11), [], 10**6
    for second in range(int(END_AT)):
        for _ in range(per_second):
            hot = generator.uniform() < 0.6
            group = 0 if hot else 1 + int(generator.uniform() * (NUM_PREFIXES - 1))
            own = list(range(fresh, fresh + OWN_BLOCKS))
            fresh += OWN_BLOCKS
            keys = (*range(1_000 * group, 1_000 * group + PREFIX_BLOCKS), *own)
            at = (second + generator.uniform()) * 1_000
            trace.append(TraceRequest(at, len(keys) * BLOCK_TOKENS, 20, keys))
    return sorted(trace, key=lambda request: request.timestamp)


def rank(fleet: Fleet) -> list[Candidate]:
    """Replicas in the order in which they should leave, from what engines and gateway know."""
    hits: Counter[str] = Counter()
    for outcome in fleet.outcomes:
        hits[outcome.uid] += outcome.cached_tokens
    found = []
    for endpoint in fleet.endpoints:
        cached, unique = fleet.gateways[0].router.cached_tokens(endpoint.uid)
        value = compute_cached_value(hits[endpoint.uid], cached_tokens=cached, unique_tokens=unique)
        found.append(Candidate(endpoint.uid, is_ready=True, cached_value=value, open_requests=0))
    return rank_victims(found)


def measure_dip(choose: Callable[[Sequence[Candidate]], Candidate]) -> float:
    """Hit rate of the minute before the shrinking less that of the minute after, in points; the fourth replica is young."""
    fleet = Fleet(FleetSettings(engines=(ENGINE,) * 4), seed=3)

    def cordon(uid: str) -> None:
        left = [msgspec.structs.replace(e, cordoned=e.uid == uid) for e in fleet.endpoints]
        fleet.gateways[0].router.update_endpoints(left)

    cordon(fleet.endpoints[-1].uid)
    fleet.clock.at(GROW_AT, lambda: cordon(""))
    fleet.clock.at(SHRINK_AT, lambda: cordon(choose(rank(fleet)).pod))
    outcomes = fleet.replay(make_trace())
    before = [o for o in outcomes if GROW_AT - 60 <= o.arrived_at < GROW_AT]
    after = [o for o in outcomes if SHRINK_AT <= o.arrived_at < SHRINK_AT + 60]
    return 100 * (find_hit_rate(before) - find_hit_rate(after))


def find_hit_rate(outcomes: Sequence[Outcome]) -> float:
    return sum(o.cached_tokens for o in outcomes) / sum(o.num_tokens for o in outcomes)


def test_as_018_the_least_valuable_leaves_and_the_hit_rate_hardly_dips() -> None:
    dips = [measure_dip(lambda ranked, place=place: ranked[place]) for place in range(4)]
    assert dips[0] <= MAX_DIP
    assert min(dips[1:]) > MAX_DIP, "the goal would mean little if another victim met it"
