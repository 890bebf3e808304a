from __future__ import annotations

from collections import Counter

from millpond_gateway.flow.queue import HoldQueue
from millpond_gateway.flow.records import (
    ClassPolicy,
    FlowReason,
    FlowSettings,
    HeldRequest,
    TenantPolicy,
)

CLASSES = (
    ClassPolicy(name="interactive", priority=100),
    ClassPolicy(name="agent", priority=50),
    ClassPolicy(name="batch", priority=0, gate_class="interactive", gate_below=4),
)


def make_held(name: str, **fields: object) -> HeldRequest:
    defaults: dict[str, object] = {
        "tenant": "t",
        "traffic_class": "interactive",
        "uncached_tokens": 100,
        "num_bytes": 10,
        "arrived_at": 0.0,
        "expires_at": 1000.0,
    }
    return HeldRequest(request_id=name, **{**defaults, **fields})  # type: ignore[arg-type]


def make_queue(*tenants: TenantPolicy, **settings: object) -> HoldQueue:
    return HoldQueue(FlowSettings(**settings), CLASSES, tenants)  # type: ignore[arg-type]


def serve(queue: HoldQueue, now: float = 0.0) -> HeldRequest | None:
    held = queue.peek(now)
    return None if held is None else queue.take(held.request_id, now)


def test_higher_priority_goes_first_and_arrival_decides_inside_a_tenant() -> None:
    queue = make_queue()
    for name, traffic_class in (
        ("b1", "batch"),
        ("a1", "agent"),
        ("i1", "interactive"),
        ("i2", "interactive"),
    ):
        queue.add(make_held(name, traffic_class=traffic_class))
    served = [held.request_id for _ in range(4) if (held := serve(queue)) is not None]
    assert served == ["i1", "i2", "a1", "b1"]


def test_tenants_share_a_band_by_tokens_not_by_requests() -> None:
    queue = make_queue()
    for number in range(400):
        queue.add(make_held(f"small{number}", tenant="small", uncached_tokens=100))
        queue.add(make_held(f"large{number}", tenant="large", uncached_tokens=4000))
    tokens: Counter[str] = Counter()
    for _ in range(300):
        held = serve(queue)
        assert held is not None
        tokens[held.tenant] += held.uncached_tokens
    assert abs(tokens["small"] - tokens["large"]) <= 3 * 4000


def test_weights_scale_the_share() -> None:
    queue = make_queue(TenantPolicy(name="gold", weight=3), TenantPolicy(name="iron", weight=1))
    for number in range(400):
        for tenant in ("gold", "iron"):
            queue.add(make_held(f"{tenant}{number}", tenant=tenant, uncached_tokens=500))
    served = Counter(held.tenant for _ in range(200) if (held := serve(queue)) is not None)
    assert 140 <= served["gold"] <= 160


def test_peek_changes_nothing_however_often_asked() -> None:
    queue = make_queue()
    for number in range(6):
        queue.add(make_held(f"r{number}", tenant=f"t{number % 3}", uncached_tokens=5000))
    first = queue.peek(0.0)
    assert all(queue.peek(0.0) == first for _ in range(10))
    assert len(queue) == 6


def test_gw_121_a_batch_request_is_served_within_the_starvation_bound() -> None:
    queue = make_queue(starvation_seconds=10.0)
    queue.add(make_held("batch", traffic_class="batch", arrived_at=0.0))
    served_at = None
    for turn in range(200):  # ten requests a second, and never fewer than five interactive ones held
        now = turn * 0.1
        for number in range(5 if turn == 0 else 1):
            queue.add(make_held(f"i{turn}-{number}", arrived_at=now))
        held = serve(queue, now)
        assert held is not None
        if held.request_id == "batch":
            served_at = now
            break
    assert served_at is not None
    assert 10.0 <= served_at <= 10.5


def test_starved_requests_take_at_most_every_fourth_turn() -> None:
    queue = make_queue(starvation_seconds=10.0)
    for number in range(40):
        queue.add(make_held(f"b{number}", traffic_class="batch", arrived_at=0.0))
        queue.add(make_held(f"i{number}", arrived_at=20.0))
    classes = [held.traffic_class for _ in range(40) if (held := serve(queue, 20.0)) is not None]
    assert classes.count("batch") == 10


def test_a_gated_class_waits_for_the_other_queue() -> None:
    queue = make_queue()
    queue.add(make_held("b", traffic_class="batch"))
    for number in range(4):
        queue.add(make_held(f"i{number}"))
    batch = queue.find_class("batch")
    assert queue.is_gated(batch)
    serve(queue)
    assert not queue.is_gated(batch)


def test_gw_122_held_bytes_are_capped_by_default() -> None:
    queue = make_queue()
    megabyte = 1024 * 1024
    refused = 0
    for number in range(10_000):
        reason = queue.add(make_held(f"r{number}", num_bytes=megabyte))
        refused += reason in {FlowReason.HELD_BYTES, FlowReason.QUEUE_FULL}
    assert queue.num_bytes <= 256 * megabyte
    assert len(queue) == 256
    assert refused == 10_000 - 256


def test_the_queue_is_bounded_in_number() -> None:
    queue = make_queue(max_held=2)
    assert [queue.add(make_held(f"r{number}")) for number in range(3)] == [None, None, FlowReason.QUEUE_FULL]


def test_holds_expire_and_leavers_are_forgotten() -> None:
    queue = make_queue()
    queue.add(make_held("short", expires_at=5.0, tenant="a"))
    queue.add(make_held("long", expires_at=50.0, tenant="b"))
    assert queue.next_expiry() == 5.0
    assert [held.request_id for held in queue.expire(5.0)] == ["short"]
    assert queue.remove("long") is not None
    assert queue.remove("long") is None
    assert (len(queue), queue.num_bytes, queue.num_tokens) == (0, 0, 0)
    assert queue.peek(0.0) is None
    assert queue.next_expiry() is None


def test_a_prompt_longer_than_many_quanta_gets_its_turn() -> None:
    queue = make_queue(quantum_tokens=100)
    queue.add(make_held("huge", tenant="a", uncached_tokens=100_000))
    for number in range(5):
        queue.add(make_held(f"s{number}", tenant="b", uncached_tokens=50))
    served = [held.request_id for _ in range(6) if (held := serve(queue)) is not None]
    assert sorted(served) == ["huge", "s0", "s1", "s2", "s3", "s4"]
