from __future__ import annotations

from collections import Counter

import pytest
from tests.support.routing import (
    count_picks,
    make_cold,
    make_endpoint,
    make_endpoints,
    make_keys,
    make_request,
    make_router,
    place,
    place_all,
    spread_of_load,
)

from millpond_gateway.routing.records import (
    ChoiceReason,
    DropReason,
    KeyKind,
    Policy,
    PromptKeys,
    RequestView,
    Reservation,
    Role,
    Usage,
)
from millpond_gateway.routing.settings import RevisionWeight


@pytest.mark.parametrize(
    ("fields", "request_fields", "reason"),
    [
        ({"ready": False}, {}, DropReason.NOT_READY),
        ({"cordoned": True}, {}, DropReason.CORDONED),
        ({"role": Role.PREFILL}, {}, DropReason.WRONG_ROLE),
        ({"role": Role.DECODE}, {"role": Role.PREFILL}, DropReason.WRONG_ROLE),
        ({"revision": "a"}, {"revision": "b"}, DropReason.WRONG_REVISION),
        ({"adapters": frozenset({"sql"})}, {"adapter": "poet"}, DropReason.ADAPTER_MISSING),
        ({"max_model_tokens": 1000}, {}, DropReason.CANNOT_FIT),
        ({"num_blocks": 60}, {}, DropReason.CANNOT_FIT),
    ],
)
def test_a_dropped_endpoint_has_a_named_reason(
    fields: dict[str, object], request_fields: dict[str, object], reason: DropReason
) -> None:
    router = make_router([make_endpoint("bad", **fields)])
    choice = router.choose(make_cold(1, 1000, **request_fields), 0.0)
    assert choice.endpoint is None
    assert choice.reason is ChoiceReason.NO_CANDIDATE
    assert [(drop.uid, drop.reason) for drop in choice.drops] == [("bad", reason)]


def test_ejected_and_tried_endpoints_are_dropped_and_the_rest_serves() -> None:
    router = make_router(3)
    router.set_ejected({"u0"})
    choice = router.choose(make_cold(1, 100), 0.0, excluded={"u1"})
    assert choice.endpoint is not None
    assert choice.endpoint.uid == "u2"
    assert choice.reason is ChoiceReason.ONLY_CANDIDATE
    assert {drop.uid: drop.reason for drop in choice.drops} == {
        "u0": DropReason.EJECTED,
        "u1": DropReason.ALREADY_TRIED,
    }


def test_an_empty_pool_is_told_from_a_dropped_one() -> None:
    assert make_router([]).choose(make_cold(1, 100), 0.0).reason is ChoiceReason.NO_ENDPOINT


def test_an_estimated_length_drops_nobody() -> None:
    router = make_router([make_endpoint("u0", max_model_tokens=1000)])
    prompt = PromptKeys(keys=(), num_tokens=1_000_000, kind=KeyKind.TEXT)
    assert router.choose(RequestView(request_id="r", prompt=prompt), 0.0).endpoint is not None


def test_reserving_without_an_endpoint_says_so() -> None:
    router = make_router([])
    request = make_cold(1, 100, name="abc")
    with pytest.raises(ValueError, match=r"abc.*NoEndpoint"):
        router.reserve(request, router.choose(request, 0.0), 0.0)


def test_the_score_breaks_the_cost_down() -> None:
    router = make_router(2, default_tokens_per_second=1000.0)
    keys = make_keys((1, 100))
    home = place(router, make_request(keys, tokens=1700))
    follower = make_request([*keys, *make_keys((2, 10))], tokens=1800)
    scores = {score.uid: score for score in router.choose(follower, 0.0).scores}
    warm, cold = scores[home.uid], next(score for uid, score in scores.items() if uid != home.uid)
    assert (warm.queued_tokens, warm.cached_tokens, warm.uncached_tokens) == (1700, 1600, 200)
    assert warm.queue_seconds == pytest.approx(1.7)
    assert (cold.queued_tokens, cold.uncached_tokens, cold.queue_seconds) == (0, 1800, 0.0)
    for score in (warm, cold):
        parts = score.queue_seconds + score.own_seconds + score.decode_seconds + score.affinity_seconds
        assert score.total_seconds == pytest.approx(parts)


def test_a_long_prompt_nearly_computed_keeps_nobody_away() -> None:
    router = make_router(2, default_tokens_per_second=1000.0)
    long = place(router, make_cold(1, 20_000), 0.0)
    other = place(router, make_cold(2, 3_000), 18.0)
    assert other.uid != long.uid
    choice = router.choose(make_cold(3, 1_000), 19.0)
    assert choice.score is not None
    assert choice.score.uid == long.uid
    assert choice.score.queue_seconds == pytest.approx(1.0)
    assert choice.score.wait_seconds == pytest.approx(2.0)


def test_a_full_hit_still_computes_the_last_token() -> None:
    router = make_router(1)
    keys = make_keys((1, 10))
    place(router, make_request(keys, tokens=160))
    assert place(router, make_request(keys, tokens=160)).uncached_tokens == 1


def test_a_request_near_the_block_limit_prefers_a_roomier_replica() -> None:
    router = make_router(make_endpoints(2, num_blocks=1000))
    full = place(router, make_cold(1, 14_000, expected_output_tokens=1000))
    router.first_token(full.id, 1.0)
    picks = [place(router, make_cold(2 + n, 500, expected_output_tokens=3000)) for n in range(2)]
    assert [pick.uid for pick in picks] == [uid for uid in ("u0", "u1") if uid != full.uid] * 2


def test_decode_pressure_is_near_zero_while_blocks_are_free() -> None:
    router = make_router(2)
    reservation = place(router, make_cold(1, 4000))
    router.first_token(reservation.id, 1.0)
    score = next(s for s in router.choose(make_cold(2, 1000), 1.0).scores if s.uid == reservation.uid)
    assert 0 < score.decode_seconds * score.tokens_per_second < 64


def test_revision_weights_split_new_requests() -> None:
    endpoints = [make_endpoint(f"u{n}", revision="new" if n == 0 else "old") for n in range(4)]
    weights = (RevisionWeight("old", 9.0), RevisionWeight("new", 1.0))
    router = make_router(endpoints, revision_weights=weights)
    picks = count_picks(place_all(router, [make_cold(n, 500) for n in range(1000)]))
    assert 60 <= picks["u0"] <= 145


def test_a_session_keeps_its_revision_and_a_dead_revision_gives_its_share_away() -> None:
    endpoints = [make_endpoint(f"u{n}", revision="ab"[n % 2]) for n in range(4)]
    router = make_router(endpoints, revision_weights=(RevisionWeight("a", 1.0), RevisionWeight("b", 1.0)))
    for session in range(20):
        picks = {place(router, make_cold(n, 300, session=session)).uid for n in range(6)}
        assert len({uid in {"u0", "u2"} for uid in picks}) == 1
    router.update_endpoints([e for e in endpoints if e.revision == "a"])
    assert place(router, make_cold(99, 300)).uid in {"u0", "u2"}


def test_gw_119_a_pinned_revision_is_never_left() -> None:
    endpoints = [
        make_endpoint(f"u{n}", revision="ab"[n % 2], role=Role.PREFILL if n < 2 else Role.DECODE)
        for n in range(4)
    ]
    router = make_router(endpoints)
    for number in range(50):
        prefill = place(router, make_cold(number, 4000, role=Role.PREFILL))
        revision = next(e.revision for e in endpoints if e.uid == prefill.uid)
        decode = place(router, make_cold(number, 4000, role=Role.DECODE, revision=revision))
        assert next(e.revision for e in endpoints if e.uid == decode.uid) == revision


def test_session_affinity_is_a_cost_not_a_rule() -> None:
    router = make_router(4)
    home = place(router, make_cold(0, 300, session=7))
    router.release(home.id)
    assert {place_and_release(router, make_cold(n, 300, session=7)).uid for n in range(1, 10)} == {home.uid}
    for number in range(20, 40):  # now the home replica has a queue
        request = make_cold(number, 2000)
        others = {e.uid for e in router.endpoints} - {home.uid}
        router.reserve(request, router.choose(request, 0.0, excluded=others), 0.0)
    assert place(router, make_cold(99, 300, session=7)).uid != home.uid


def place_and_release(router, request) -> Reservation:  # type: ignore[no-untyped-def]
    reservation = place(router, request)
    router.release(reservation.id)
    return reservation


def test_gw_027_a_removed_replica_leaves_nothing_behind() -> None:
    router = make_router(2)
    keys = make_keys((1, 50))
    gone = place(router, make_request(keys, session=5))
    rest = [e for e in router.endpoints if e.uid != gone.uid]
    assert router.update_endpoints(rest) == (gone.uid,)
    assert router.load.view(gone.uid).queued_tokens == 0
    assert router.index.routed.num_blocks(gone.uid) == 0
    assert not router.release(gone.id)
    again = router.choose(make_request(keys, session=5), 0.1)
    assert again.score is not None
    assert again.score.cached_tokens == 0
    assert again.score.affinity_seconds == 0.0


def test_a_new_epoch_at_the_same_uid_purges_books_and_index() -> None:
    router = make_router([make_endpoint("u0", epoch=None)])
    keys = make_keys((1, 50))
    reservation = place(router, make_request(keys))
    assert not router.note_epoch("u0", "aa")  # a first epoch is no restart
    assert router.load.view("u0").queued_tokens == 801
    assert router.note_epoch("u0", "bb")
    assert router.load.view("u0").queued_tokens == 0
    assert not router.first_token(reservation.id, 1.0)
    assert router.index.predict(make_request(keys).prompt, 1.0).replicas == {}
    assert router.update_endpoints([make_endpoint("u0", epoch="cc")]) == ("u0",)


def test_a_view_older_than_a_response_header_restarts_nothing_again() -> None:
    router = make_router([make_endpoint("u0", epoch="aa")])
    assert router.note_epoch("u0", "bb")
    reservation = place(router, make_cold(1, 500))
    assert router.update_endpoints([make_endpoint("u0", epoch="aa")]) == ()  # polled before the restart
    assert router.update_endpoints([make_endpoint("u0", epoch=None)]) == ()
    assert not router.note_epoch("u0", "aa")
    assert router.endpoints[0].epoch == "bb"
    assert router.release(reservation.id)
    assert router.update_endpoints([make_endpoint("u0", epoch="cc")]) == ("u0",)


def test_partition_hashing_agrees_without_talking_and_bounds_the_load() -> None:
    gateways = [make_router(8, seed=seed) for seed in range(4)]
    for gateway in gateways:
        gateway.set_partition(4)
    agreed = 0
    for number in range(40):
        request = make_request(make_keys((number, 40)))
        choices = [gateway.choose(request, 0.0) for gateway in gateways]
        assert all(choice.reason is ChoiceReason.PARTITION_HASH for choice in choices)
        agreed += len({choice.endpoint.uid for choice in choices if choice.endpoint}) == 1
    assert agreed == 40
    hot = [make_request(make_keys((999, 4), (n, 40))) for n in range(200)]
    place_all(gateways[0], hot)
    assert spread_of_load(gateways[0]) <= 1.5


def test_partition_ends_when_peers_are_back() -> None:
    router = make_router(4)
    router.set_partition(3)
    router.set_partition(1)
    assert router.choose(make_cold(1, 500), 0.0).reason is ChoiceReason.TIE


def test_learned_speed_moves_load_from_a_slow_replica() -> None:
    router = make_router(2, policy=Policy.LEAST_LOADED)
    picks: Counter[str] = Counter()
    now = 0.0
    free_at = {"u0": 0.0, "u1": 0.0}
    speeds = {"u0": 9000.0, "u1": 3000.0}
    for number in range(300):
        now += 0.1
        reservation = place(router, make_cold(number, 1000), now)
        picks[reservation.uid] += 1
        start = max(free_at[reservation.uid], now)
        free_at[reservation.uid] = start + 1000 / speeds[reservation.uid]
        router.first_token(reservation.id, free_at[reservation.uid])
        router.release(reservation.id)
    assert router.speeds.tokens_per_second("u0") > 2 * router.speeds.tokens_per_second("u1")


def test_an_audit_corrects_what_the_index_promises() -> None:
    router = make_router(1)
    keys = make_keys((1, 100))
    place(router, make_request(keys))
    for _ in range(60):
        reservation = place(router, make_request(keys))
        router.release(reservation.id, Usage(prompt_tokens=1601, cached_tokens=800))
    score = router.choose(make_request(keys), 1.0).score
    assert score is not None
    assert 700 <= score.cached_tokens <= 900


def test_gw_098_two_pools_keep_their_own_books() -> None:
    first, second = make_router(1), make_router(1)
    keys = make_keys((1, 20))
    place(first, make_request(keys))
    assert second.load.view("u0").queued_tokens == 0
    assert second.index.predict(make_request(keys).prompt, 0.0).replicas == {}


def test_cached_value_tells_shared_from_unique_tokens() -> None:
    router = make_router(2)
    shared = make_keys((1, 50))
    first = place(router, make_request([*shared, *make_keys((2, 10))]))
    others = {e.uid for e in router.endpoints if e.uid == first.uid}
    request = make_request(shared)
    second = router.reserve(request, router.choose(request, 0.0, excluded=others), 0.0)
    assert router.cached_tokens(first.uid) == (60 * 16, 10 * 16)
    assert router.cached_tokens(second.uid) == (50 * 16, 0)
    assert router.cached_tokens("unknown") == (0, 0)
