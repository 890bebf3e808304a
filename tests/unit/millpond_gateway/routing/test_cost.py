from __future__ import annotations

import math

import pytest
from tests.support.routing import make_cold, make_endpoint

from millpond_gateway.routing.cost import (
    compute_kv_blocks,
    compute_price,
    compute_price_of_sharing,
    compute_score,
)
from millpond_gateway.routing.records import Policy, Role
from millpond_gateway.routing.score import Load, Prediction, Score
from millpond_gateway.routing.settings import RoutingSettings

IDLE = Load()


def score(
    *,
    cached: int = 0,
    shared: int = 0,
    reuses: float = math.inf,
    price: float = 5.0,
    load: Load = IDLE,
    speed: float = 1000.0,
    **fields: object,
) -> Score:
    return compute_score(
        make_endpoint("u0", **fields),
        load,
        make_cold(1, 4000),
        RoutingSettings(),
        prediction=Prediction(cached, cached, None),
        shared_tokens=shared,
        num_reuses=reuses,
        tokens_per_second=speed,
        mean_tokens_per_second=1000.0,
        price=price,
        away_from_home=False,
        now=0.0,
    )


@pytest.mark.parametrize(
    ("cached", "shared", "own_seconds"),
    [
        (0, 0, 20.0),  # all of it is this request's alone
        (0, 3000, 1.5 + 5.0),  # a copy of the shared part serves many others too
        (1000, 3000, 1.0 + 5.0),  # part of the shared prefix is there
        (3500, 3000, 2.5),  # nothing shared is missing
        (0, 4000, 2.0),
    ],
)
def test_missing_tokens_of_a_hot_prefix_cost_half_their_time_and_the_rest_its_price(
    cached: int, shared: int, own_seconds: float
) -> None:
    assert score(cached=cached, shared=shared).own_seconds == pytest.approx(own_seconds)


@pytest.mark.parametrize(("speed", "own_seconds"), [(500.0, 8.0), (1000.0, 4.0), (4000.0, 1.0)])
def test_what_a_request_costs_others_is_paid_at_the_pools_mean_speed(
    speed: float, own_seconds: float
) -> None:
    """A slow replica's seconds delay fewer others: at its own speed the price kept work from it beside full queues."""
    assert score(speed=speed, price=1.0).own_seconds == pytest.approx(own_seconds)
    assert score(speed=speed, price=5.0).own_seconds == pytest.approx(own_seconds + 16.0)


@pytest.mark.parametrize(
    ("price", "num_reuses", "expected"),
    [
        (5.0, 0.0, 5.0),  # nobody comes again before its eviction: as dear as a session's own history
        (5.0, 1.0, 2.75),
        (5.0, 8.0, 1.0),
        (5.0, math.inf, 0.5),
        (1.0, 0.0, 1.0),  # an idle pool
        (0.4, 0.0, 0.5),
    ],
)
def test_another_copy_of_a_shared_prefix_gets_cheaper_with_each_use_it_will_have(
    price: float, num_reuses: float, expected: float
) -> None:
    assert compute_price_of_sharing(price, num_reuses, RoutingSettings()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("utilization", "price"),
    [(-1.0, 1.0), (0.0, 1.0), (0.5, 2.0), (0.75, 4.0), (0.8, 5.0), (0.99, 5.0), (3.0, 5.0)],
)
def test_the_price_of_recompute_follows_utilization_up_to_its_setting(
    utilization: float, price: float
) -> None:
    assert compute_price(utilization, RoutingSettings()) == pytest.approx(price)


def test_policy_prefix_always_pays_its_own_price() -> None:
    settings = RoutingSettings(policy=Policy.PREFIX)
    assert compute_price(0.0, settings) == compute_price(2.0, settings) == settings.prefix_price_of_recompute


def test_decode_pressure_is_steep_past_the_soft_limit() -> None:
    def pressure(decoding_blocks: int) -> float:
        load = Load(kv_blocks=decoding_blocks, decoding_blocks=decoding_blocks, num_decoding=1)
        return score(load=load, num_blocks=1000).decode_seconds

    assert pressure(600) == 0.0
    assert pressure(800) > 1.0
    assert pressure(900) - pressure(800) == pytest.approx(5.0 * 100 * 16 / 1000.0)


def test_requests_still_queued_in_the_engine_hold_no_blocks_yet() -> None:
    """An overloaded pool would otherwise be routed by pressure alone, away from every warm prefix."""
    queued = Load(queued_tokens=50_000, kv_blocks=5000, num_prefilling=20)
    assert score(load=queued, num_blocks=1000).decode_seconds == 0.0


@pytest.mark.parametrize(("role", "blocks"), [(Role.BOTH, 22), (Role.PREFILL, 6), (Role.DECODE, 266)])
def test_blocks_taken_depend_on_the_leg(role: Role, blocks: int) -> None:
    assert compute_kv_blocks(make_endpoint("u0"), make_cold(1, 4000, role=role), 96) == blocks
