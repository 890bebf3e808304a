from __future__ import annotations

import math

import pytest
from tests.support.routing import (
    BLOCK,
    make_endpoint,
    make_keys,
    make_request,
    make_router,
    make_tokens,
    place,
    token_keys,
)

from millpond_common.contract import kv_events as wire
from millpond_gateway.routing.index import PrefixIndex
from millpond_gateway.routing.records import (
    EndpointView,
    KeyKind,
    PromptKeys,
    RequestView,
    Reservation,
    Usage,
)
from millpond_gateway.routing.settings import RoutingSettings

TOKENS = make_tokens(1, 40 * BLOCK + 3)
KEYS = token_keys(TOKENS)
PROMPT = PromptKeys(keys=KEYS, tokens_per_key=float(BLOCK), num_tokens=len(TOKENS), kind=KeyKind.TOKENS)


def make_index() -> PrefixIndex:
    return PrefixIndex(RoutingSettings(model="m"))


def publish(count: int, *, sequence: int = 0, epoch: str = "aa") -> tuple[int, bytes]:
    """What our engine sends when it holds the first `count` blocks of TOKENS."""
    event = wire.StoredBlocks(
        keys=tuple(KEYS[:count]), parent=None, tokens=TOKENS[: count * BLOCK], block_tokens=BLOCK
    )
    return sequence, wire.encode_batch([event], wire.EventStamp(epoch, count, 0), seconds=1.0)


def predict(index: PrefixIndex, uid: str = "u0", now: float = 100.0) -> int:
    prediction = index.predict(PROMPT, now).replicas.get(uid)
    return 0 if prediction is None else prediction.cached_tokens


def test_gw_083_prediction_equals_what_the_engine_will_find_cached() -> None:
    index = make_index()
    stream = index.open_stream(make_endpoint("u0"))
    stream.live(*publish(25), 1.0)
    assert predict(index) == 25 * BLOCK


def test_events_correct_what_was_routed_long_ago() -> None:
    index = make_index()
    endpoint = make_endpoint("u0")
    index.note_routed(endpoint, KEYS, 1.0, tokens_per_key=BLOCK)
    assert predict(index) == 40 * BLOCK
    index.open_stream(endpoint).live(*publish(10), 2.0)
    assert predict(index) == 10 * BLOCK  # the rest was evicted


def test_uses_of_another_copy_follow_from_the_last_use_the_copies_and_how_long_blocks_stay() -> None:
    index = make_index()
    shared = [*KEYS[:30], *make_keys((5, 2))]
    for uid, seconds in (("u0", 90.0), ("u1", 96.0)):
        index.note_routed(make_endpoint(uid, num_blocks=100), shared, seconds, tokens_per_key=BLOCK)
    index.note_routed(make_endpoint("u2", num_blocks=40), make_keys((6, 40)), 60.0, tokens_per_key=BLOCK)
    found = index.predict(PROMPT, 100.0)
    assert found.shared_tokens == 30 * BLOCK
    assert found.reuse_seconds == pytest.approx(
        4.0 * 3
    )  # four seconds ago; three replicas would share the uses
    assert index.expect_reuses(found, "u2", 100.0) == pytest.approx(40.0 / 12.0)
    assert index.expect_reuses(found, "u3", 100.0) == math.inf  # nothing is evicted there
    now = index.predict(PROMPT, 96.0)
    assert index.expect_reuses(now, "u2", 96.0) > 1000  # used this instant: hot, and no division by zero


def test_a_prefix_routed_just_now_counts_before_its_events_come() -> None:
    index = make_index()
    endpoint = make_endpoint("u0")
    index.open_stream(endpoint).live(*publish(1), 99.0)
    index.note_routed(endpoint, KEYS, 99.0, tokens_per_key=BLOCK)
    assert predict(index, now=100.0) == 40 * BLOCK
    assert predict(index, now=110.0) < 40 * BLOCK


def test_without_confidence_the_routed_layer_decides() -> None:
    index = make_index()
    endpoint = make_endpoint("u0")
    index.note_routed(endpoint, KEYS, 1.0, tokens_per_key=BLOCK)
    index.open_stream(endpoint)  # connected, nothing heard yet
    assert predict(index) == 40 * BLOCK


def test_gw_077_streams_belong_to_connections_not_topics() -> None:
    index = make_index()
    first, second = (index.open_stream(make_endpoint(uid)) for uid in ("u0", "u1"))
    first.live(*publish(30), 1.0)
    second.live(*publish(5), 1.0)
    assert (predict(index, "u0"), predict(index, "u1")) == (30 * BLOCK, 5 * BLOCK)


def test_gw_078_closing_one_subscription_leaves_the_others() -> None:
    indices = [make_index(), make_index()]
    for index in indices:
        for uid in ("u0", "u1"):
            index.open_stream(make_endpoint(uid)).live(*publish(20), 1.0)
    indices[0].close_stream("u0")
    assert predict(indices[0], "u0") == 0
    assert predict(indices[0], "u1") == predict(indices[1], "u0") == 20 * BLOCK


def make_reservation(*, cached: int, routed: int, held: int | None) -> Reservation:
    return Reservation(
        id=1,
        request_id="r",
        uid="u0",
        epoch=None,
        uncached_tokens=1,
        cached_tokens=cached,
        kv_blocks=1,
        output_tokens=1,
        reserved_at=0.0,
        routed_tokens=routed,
        held_tokens=held,
    )


def test_gw_079_three_series_tell_workload_routing_and_index_loss_apart() -> None:
    workload, routing, index_loss = make_index(), make_index(), make_index()
    # the workload shares less: nobody predicted and nobody found anything
    workload.audit(make_reservation(cached=0, routed=0, held=0), prompt_tokens=1000, real=0)
    # routing went elsewhere although routed requests knew better
    routing.audit(make_reservation(cached=100, routed=100, held=100), prompt_tokens=1000, real=100)
    # the index promised what the engine no longer had
    index_loss.audit(make_reservation(cached=900, routed=900, held=900), prompt_tokens=1000, real=100)
    assert workload.totals == (1000, 0, 0, 0, 0)
    assert routing.totals.predicted_tokens == routing.totals.real_tokens == 100
    assert index_loss.totals.predicted_tokens - index_loss.totals.real_tokens == 800


def test_an_engines_restart_purges_both_layers() -> None:
    router = make_router([make_endpoint("u0", epoch="aa")], model="m")
    stream = router.index.open_stream(router.endpoints[0])
    stream.live(*publish(30), 1.0)
    place(router, make_request(KEYS), 1.0)
    assert router.note_epoch("u0", "bb")
    assert router.index.predict(PROMPT, 1.1).replicas == {}


def test_usage_feeds_the_audit_of_both_layers() -> None:
    router = make_router([make_endpoint("u0")], model="m")
    stream = router.index.open_stream(router.endpoints[0])
    stream.live(*publish(40), 1.0)
    for _ in range(10):
        reservation = place(router, make_request(KEYS), 100.0)
        router.release(reservation.id, Usage(prompt_tokens=641, cached_tokens=64))
    assert stream.confidence(100.0) < 0.5
    assert router.index.totals.real_tokens == 640


@pytest.mark.parametrize("num_tokens", [1, 640, 641, 643])
def test_a_prediction_never_covers_the_last_token(num_tokens: int) -> None:
    index = make_index()
    index.note_routed(make_endpoint("u0"), KEYS, 1.0, tokens_per_key=BLOCK)
    prompt = PromptKeys(keys=KEYS, tokens_per_key=16.0, num_tokens=num_tokens, kind=KeyKind.TOKENS)
    prediction = index.predict(prompt, 1.0).replicas["u0"]
    assert prediction.cached_tokens == min(640, num_tokens - 1)


def test_gw_089_unstable_prefixes_are_reported_per_tenant() -> None:
    router = make_router(2)
    for turn in range(6):
        steady = make_keys((1, 4), (2, turn))
        counter = make_keys((100 + turn, 4))  # the first block changes each turn
        place(router, make_request(steady, session=1, tenant="steady"), float(turn))
        place(router, make_request(counter, session=2, tenant="counter"), float(turn))
    view = router.stability.view()
    assert (view["steady"].num_turns, view["steady"].num_unstable) == (5, 0)
    assert (view["counter"].num_turns, view["counter"].num_unstable) == (5, 5)


def test_endpoint_size_bounds_the_routed_layer() -> None:
    router = make_router([EndpointView(uid="u0", pod="", address="", ready=True, num_blocks=100)])
    for number in range(50):
        place(router, make_request(make_keys((number, 30)), tokens=481))
    assert router.index.routed.num_blocks("u0") == 100


TEXT = PromptKeys(keys=make_keys((7, 30)), tokens_per_key=32.0, num_tokens=1000, kind=KeyKind.TEXT)


def test_gw_083_events_say_nothing_about_text_keys() -> None:
    """Keys of raw text never meet keys of templated tokens: the routed layer and the audit alone predict."""
    router = make_router([make_endpoint("u0")], model="m")
    stream = router.index.open_stream(router.endpoints[0])
    stream.live(*publish(40), 1.0)
    request = RequestView(request_id="r", prompt=TEXT)
    place(router, request, 2.0)
    for _ in range(40):
        reservation = place(router, request, 100.0)  # long past the speculative seconds
        assert reservation.held_tokens is None
        router.release(reservation.id, Usage(prompt_tokens=1000, cached_tokens=900))
    prediction = router.index.predict(TEXT, 100.0).replicas["u0"]
    assert prediction.cached_tokens == pytest.approx(900, rel=0.05)
    assert stream.confidence(1.0) == 1.0


@pytest.mark.parametrize("loss", ["restart", "clear"])
def test_gw_071_a_lost_cache_is_lost_for_text_keys_too(loss: str) -> None:
    router = make_router([make_endpoint("u0")], model="m")
    stream = router.index.open_stream(router.endpoints[0])
    stream.live(*publish(1), 1.0)
    place(router, RequestView(request_id="r", prompt=TEXT), 2.0)
    assert "u0" in router.index.predict(TEXT, 2.5).replicas
    if loss == "restart":
        stream.live(*publish(1, epoch="bb"), 3.0)
    else:
        stamp = wire.EventStamp("aa", 1, 1)
        stream.live(1, wire.encode_batch([wire.ClearedBlocks()], stamp, seconds=3.0), 3.0)
    assert router.index.predict(TEXT, 3.1).replicas == {}


def test_the_routed_layer_is_bounded_in_tokens_whatever_a_key_stands_for() -> None:
    router = make_router([make_endpoint("u0", num_blocks=100)])
    for number in range(20):
        prompt = PromptKeys(
            keys=make_keys((number, 30)), tokens_per_key=32.0, num_tokens=1000, kind=KeyKind.TEXT
        )
        place(router, RequestView(request_id="r", prompt=prompt))
    assert router.index.routed.num_blocks("u0") == 50
