"""Cases of balance and herding that one gateway decides alone."""

from __future__ import annotations

import pytest
from tests.support.routing import (
    CHI_SQUARED_99,
    chi_squared,
    count_picks,
    make_cold,
    make_endpoints,
    make_keys,
    make_request,
    make_router,
    place,
    place_all,
    spread_of_load,
)

from millpond_gateway.routing.records import ChoiceReason, KeyKind, Policy, PromptKeys, RequestView, Role
from millpond_gateway.routing.splitmix import SplitMix


def test_gw_001_local_reservations_spread_load_while_engines_report_none() -> None:
    router = make_router(4)
    picks = count_picks(place_all(router, [make_cold(number, 2000) for number in range(40)]))
    assert all(5 <= picks[f"u{number}"] <= 15 for number in range(4))


def test_gw_002_load_is_reserved_when_decided() -> None:
    router = make_router(8)
    for number in range(64):
        place(router, make_cold(number, 32_000, expected_output_tokens=1), now=number * 0.1 / 64)
    assert spread_of_load(router) <= 1.3


def test_gw_006_a_system_prompt_of_all_requests_lives_on_several_replicas() -> None:
    router = make_router(8)
    requests = [make_request(make_keys((1, 100), (10 + number, 12))) for number in range(400)]
    reservations = place_all(router, requests)
    assert spread_of_load(router) <= 1.3
    assert len(count_picks(reservations)) == 8
    held = router.index.predict(requests[0].prompt, 0.0).replicas
    assert sum(prediction.cached_tokens >= 100 * 16 for prediction in held.values()) == 8


def test_gw_007_no_decode_replica_idles_beside_a_backlog() -> None:
    router = make_router(make_endpoints(5, role=Role.DECODE))
    generator = SplitMix(3)
    requests = [
        make_cold(number, 500, role=Role.DECODE, expected_output_tokens=50 + generator.below(400))
        for number in range(384)
    ]
    place_all(router, requests)
    loads = [router.load.view(f"u{number}").output_tokens for number in range(5)]
    assert min(loads) > 0.8 * max(loads)


def test_gw_008_gateways_that_decide_at_once_on_one_view_do_not_herd() -> None:
    routers = [make_router(8, seed=seed) for seed in range(16)]
    totals: dict[str, int] = {f"u{number}": 0 for number in range(8)}
    for number in range(1000):
        request = make_cold(number, 1000)
        picks = [router.choose(request, float(number)).endpoint for router in routers]
        uids = [endpoint.uid for endpoint in picks if endpoint is not None]
        assert len(set(uids)) > 1
        for uid in uids:
            totals[uid] += 1
    assert chi_squared(totals.values()) < CHI_SQUARED_99[7]


def test_gw_009_equal_costs_are_picked_uniformly() -> None:
    request = make_cold(1, 1000)
    total = 0.0
    for seed in range(5):
        router = make_router(7, seed=seed)
        counts = {f"u{number}": 0 for number in range(7)}
        for _ in range(2000):
            choice = router.choose(request, 0.0)
            assert choice.endpoint is not None
            assert choice.reason is ChoiceReason.TIE
            counts[choice.endpoint.uid] += 1
        total += chi_squared(counts.values())
    assert total < CHI_SQUARED_99[30]


def test_the_generator_is_the_published_one() -> None:
    assert SplitMix(1234567).next() == 6457827717110365317


def test_a_seed_replays_every_tie() -> None:
    runs = [
        [place(make_router(7, seed=5), make_cold(number, 900)).uid for number in range(20)] for _ in range(2)
    ]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("reported", [None, 5000.0])
def test_gw_010_local_counts_decide_between_two_reports(reported: float | None) -> None:
    router = make_router(make_endpoints(5, prefill_tokens_per_second=reported))
    place_all(router, [make_cold(number, 1500) for number in range(50)], now=1.0)
    assert spread_of_load(router) <= 1.1


def test_gw_011_without_any_engine_report_local_token_counts_decide() -> None:
    router = make_router(make_endpoints(4, num_blocks=None, prefill_tokens_per_second=None, epoch=None))
    place(router, make_cold(0, 50_000))
    busy = next(e.uid for e in router.endpoints if router.load.view(e.uid).queued_tokens)
    picks = count_picks(place_all(router, [make_cold(1 + number, 1000) for number in range(30)]))
    assert busy not in picks
    assert len(picks) == 3


def test_gw_012_rotation_is_kept_per_pool() -> None:
    pools = [make_router(2, policy=Policy.ROUND_ROBIN) for _ in range(2)]
    picks: list[list[str]] = [[], []]
    for turn in range(8):
        picks[turn % 2].append(place(pools[turn % 2], make_cold(turn, 100)).uid)
    assert picks == [["u0", "u1", "u0", "u1"]] * 2


def test_rotation_survives_a_leaving_endpoint() -> None:
    router = make_router(4, policy=Policy.ROUND_ROBIN)
    first = [place(router, make_cold(n, 100)).uid for n in range(2)]
    router.update_endpoints([e for e in router.endpoints if e.uid != "u2"])
    assert [*first, *(place(router, make_cold(9 + n, 100)).uid for n in range(3))] == [
        "u0",
        "u1",
        "u3",
        "u0",
        "u1",
    ]


def test_gw_013_cold_requests_fill_every_replicas_index() -> None:
    router = make_router(4)
    picks = count_picks(place_all(router, [make_cold(number, 800) for number in range(100)]))
    assert all(15 <= picks[f"u{number}"] <= 35 for number in range(4))
    assert all(router.index.routed.num_blocks(f"u{number}") > 0 for number in range(4))


def test_gw_016_no_data_parallel_rank_queues_twice_the_mean() -> None:
    router = make_router(8)
    generator = SplitMix(11)
    place_all(router, [make_cold(number, 200 + generator.below(4000)) for number in range(512)])
    waiting = [router.load.view(f"u{number}").num_prefilling for number in range(8)]
    assert max(waiting) <= 2 * sum(waiting) / 8


def test_gw_018_load_is_tokens_not_requests() -> None:
    router = make_router(2)
    big = place(router, make_cold(0, 10_000)).uid
    others = [place(router, make_cold(1 + n, 1000)).uid for n in range(2)]
    assert big not in others
    assert place(router, make_cold(7, 1000)).uid == others[0]


def test_gw_019_text_keys_are_counted_and_still_spread() -> None:
    router = make_router(4)
    for number in range(40):
        prompt = PromptKeys(
            keys=make_keys((number, 30)), tokens_per_key=32.0, num_tokens=1000, kind=KeyKind.TEXT
        )
        place(router, RequestView(request_id=str(number), prompt=prompt))
    assert router.num_by_key_kind[KeyKind.TEXT] == 40
    assert spread_of_load(router) <= 1.3


def test_least_loaded_ignores_the_prefix_and_prefix_prefers_it() -> None:
    keys = make_keys((1, 200))
    for policy, follows in ((Policy.LEAST_LOADED, False), (Policy.PREFIX, True), (Policy.AUTO, True)):
        router = make_router(4, policy=policy)
        home = place(router, make_request(keys)).uid
        follower = place(router, make_request([*keys, *make_keys((2, 4))]), now=0.1)
        assert (follower.uid == home) is follows, policy


def test_a_prefix_does_not_hold_against_a_long_queue() -> None:
    router = make_router(2)
    keys = make_keys((1, 100))
    home = place(router, make_request(keys)).uid
    other = {"u0", "u1"} - {home}
    for number in range(8):
        request = make_cold(number, 2000)
        router.reserve(request, router.choose(request, 0.0, excluded=other), 0.0)
    queue = router.load.view(home).queued_tokens
    assert queue > 5 * 1600
    assert place(router, make_request(keys)).uid != home
