"""The hold queue is fair in tokens, starves nobody and loses nothing."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from millpond_gateway.flow.budget import Budgets
from millpond_gateway.flow.queue import HoldQueue
from millpond_gateway.flow.records import Action, ClassPolicy, FlowSettings, HeldRequest, TenantPolicy

CLASSES = (ClassPolicy(name="high", priority=10), ClassPolicy(name="low", priority=0))


def make_held(
    name: str, tenant: str, tokens: int, *, traffic_class: str = "high", now: float = 0.0
) -> HeldRequest:
    return HeldRequest(
        request_id=name,
        tenant=tenant,
        traffic_class=traffic_class,
        uncached_tokens=tokens,
        num_bytes=1,
        arrived_at=now,
        expires_at=1e9,
    )


def compute_jain(shares: list[float]) -> float:
    """Jain's index: 1 when all shares are equal, 1/n when one has all."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.lists(st.integers(50, 6000), min_size=8, max_size=8))
def test_a_ten_times_noisier_tenant_gets_no_more_tokens(num_tenants: int, sizes: list[int]) -> None:
    queue = HoldQueue(FlowSettings(), CLASSES)
    waiting: Counter[str] = Counter()
    for tenant in range(num_tenants):
        for number in range(800 if tenant == 0 else 80):
            size = sizes[(number + tenant) % len(sizes)]
            queue.add(make_held(f"t{tenant}-{number}", f"t{tenant}", size))
            waiting[f"t{tenant}"] += 1
    tokens: Counter[str] = Counter()
    while min(waiting.values()) > 0:  # shares are compared while everybody waits
        held = queue.peek(0.0)
        assert held is not None
        queue.take(held.request_id, 0.0)
        waiting[held.tenant] -= 1
        tokens[held.tenant] += held.uncached_tokens
    if min(tokens.values()) > 10 * max(*sizes, 2048):  # shorter runs compare single quanta
        assert compute_jain([float(value) for value in tokens.values()]) >= 0.95


def test_a_ten_times_noisier_tenant_slows_nobody_within_its_share() -> None:
    def worst_wait(noise: int) -> int:
        queue = HoldQueue(FlowSettings(), CLASSES)
        waits: list[int] = []
        for turn in range(500):
            for number in range(noise):
                queue.add(make_held(f"n{turn}-{number}", "noisy", 2000, now=turn))
            for victim in range(3):
                queue.add(make_held(f"v{turn}-{victim}", f"victim{victim}", 500, now=turn))
            for _ in range(6):
                held = queue.peek(0.0)
                if held is not None:
                    queue.take(held.request_id, 0.0)
                    waits += [turn - int(held.arrived_at)] if held.tenant != "noisy" else []
        return max(waits)

    assert worst_wait(0) == 0
    assert worst_wait(10) <= 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9000), st.booleans()), min_size=1, max_size=60))
def test_everything_held_is_served_exactly_once(requests: list[tuple[int, int, bool]]) -> None:
    queue = HoldQueue(FlowSettings(quantum_tokens=500), CLASSES)
    for number, (tenant, tokens, low) in enumerate(requests):
        held = make_held(f"r{number}", f"t{tenant}", tokens, traffic_class="low" if low else "high")
        assert queue.add(held) is None
    assert queue.num_tokens == sum(tokens for _, tokens, _ in requests)
    served = []
    while (held := queue.peek(0.0)) is not None:
        served.append(queue.take(held.request_id, 0.0).request_id)
    assert sorted(served) == sorted(f"r{number}" for number in range(len(requests)))
    assert (len(queue), queue.num_tokens, queue.num_bytes) == (0, 0, 0)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.floats(0.5, 8.0), st.integers(1, 4))
def test_a_low_request_waits_at_most_the_bound_and_a_few_turns(
    per_turn: int, seconds_per_turn: float, num_low: int
) -> None:
    queue = HoldQueue(FlowSettings(starvation_seconds=10.0), CLASSES)
    for number in range(num_low):
        queue.add(make_held(f"low{number}", "t", 100, traffic_class="low"))
    served_at: list[float] = []
    for turn in range(400):
        now = turn * seconds_per_turn
        for number in range(per_turn):
            queue.add(make_held(f"h{turn}-{number}", f"u{number}", 100, now=now))
        held = queue.peek(now)
        assert held is not None
        queue.take(held.request_id, now)
        if held.request_id.startswith("low"):
            served_at.append(now)
        if len(served_at) == num_low:
            break
    assert len(served_at) == num_low
    assert max(served_at) <= 10.0 + 4 * (num_low + 1) * seconds_per_turn


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 2000), st.integers(0, 3000), st.floats(0.0, 5.0)),
        max_size=60,
    )
)
def test_a_budget_never_admits_more_than_it_refills(history: list[tuple[int, int, int, float]]) -> None:
    limit = 1000
    budgets = Budgets([TenantPolicy(name="t", tokens_per_minute=limit, max_concurrency=5)])
    now = balance = 0.0
    reserved: dict[str, int] = {}
    for number, tokens, used, pause in history:
        now += pause
        name = f"r{number}"
        if name in reserved:
            assert budgets.settle(name, used, now)
            balance += reserved.pop(name) - used
        elif budgets.reserve(name, "t", tokens, now).action is Action.ADMIT:
            reserved[name] = tokens
            balance -= tokens
        assert budgets.num_open("t") == len(reserved) <= 5
        level = budgets.level("t", now)
        assert level is not None
        # what is left is never more than what came in less what is taken; a full bucket wastes the rest
        assert level <= min(limit, limit + now * limit / 60.0 + balance) + 1e-6
