from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond_gateway.flow.budget import Budgets
from millpond_gateway.flow.records import Action, FlowReason, TenantPolicy


def make_budgets(**fields: int) -> Budgets:
    return Budgets([TenantPolicy(name="acme", **fields)])


def test_gw_100_tokens_are_reserved_up_front_and_settled_on_usage() -> None:
    budgets = make_budgets(tokens_per_minute=1000)
    too_much = budgets.reserve("r0", "acme", 5000, now=0.0)  # prompt + max_tokens
    assert (too_much.action, too_much.reason, too_much.status) == (
        Action.SHED,
        FlowReason.TOKENS_NEVER_FIT,
        429,
    )
    assert too_much.retry_after_seconds is None  # waiting does not help
    assert budgets.reserve("r1", "acme", 800, now=0.0).action is Action.ADMIT
    second = budgets.reserve("r2", "acme", 800, now=0.0)
    assert (second.reason, second.retry_after_seconds) == (FlowReason.TENANT_TOKENS, 36)
    assert budgets.settle("r1", 100, now=0.0)
    assert budgets.level("acme", 0.0) == 900
    assert budgets.reserve("r2", "acme", 800, now=0.0).action is Action.ADMIT


def test_retry_after_is_a_promise() -> None:
    budgets = make_budgets(tokens_per_minute=600)
    budgets.reserve("r1", "acme", 600, now=0.0)
    refused = budgets.reserve("r2", "acme", 300, now=5.0)
    assert refused.retry_after_seconds == 25
    assert budgets.reserve("r2", "acme", 300, now=5.0 + 25).action is Action.ADMIT


def test_usage_beyond_the_reservation_is_a_debt() -> None:
    budgets = make_budgets(tokens_per_minute=1000)
    budgets.reserve("r1", "acme", 500, now=0.0)
    budgets.settle("r1", 1500, now=0.0)
    assert budgets.level("acme", 0.0) == -500
    assert budgets.reserve("r2", "acme", 100, now=0.0).reason is FlowReason.TENANT_TOKENS


def test_a_request_settles_once() -> None:
    budgets = make_budgets(tokens_per_minute=1000, max_concurrency=1)
    budgets.reserve("r1", "acme", 500, now=0.0)
    assert budgets.settle("r1", 0, now=0.0)
    assert not budgets.settle("r1", 0, now=0.0)
    assert (budgets.level("acme", 0.0), budgets.num_open("acme")) == (1000, 0)


def test_concurrency_counts_other_gateways_too() -> None:
    budgets = make_budgets(max_concurrency=2)
    budgets.charge_remote("acme", 10, now=0.0)
    assert budgets.reserve("r1", "acme", 1, now=0.0).action is Action.ADMIT
    refused = budgets.reserve("r2", "acme", 1, now=0.0)
    assert (refused.reason, refused.status, refused.code.value) == (
        FlowReason.TENANT_CONCURRENCY,
        429,
        "tenant_concurrency",
    )
    budgets.release_remote("acme", now=0.0)
    assert budgets.reserve("r2", "acme", 1, now=0.0).action is Action.ADMIT


def test_a_refusal_takes_nothing() -> None:
    budgets = make_budgets(tokens_per_minute=1000, max_concurrency=1)
    budgets.reserve("r1", "acme", 100, now=0.0)
    budgets.reserve("r2", "acme", 100, now=0.0)
    assert (budgets.level("acme", 0.0), budgets.num_open("acme")) == (900, 1)


@pytest.mark.parametrize("tenant", ["", "unknown"])
def test_a_tenant_without_a_policy_has_no_limit(tenant: str) -> None:
    budgets = make_budgets(tokens_per_minute=1)
    for number in range(100):
        assert budgets.reserve(f"r{number}", tenant, 10**6, now=0.0).action is Action.ADMIT
    assert budgets.level(tenant, 0.0) is None
    assert budgets.num_open(tenant) == 100


def test_changed_limits_apply_at_once() -> None:
    budgets = make_budgets(tokens_per_minute=1000)
    budgets.reserve("r1", "acme", 1000, now=0.0)
    budgets.set_policies([TenantPolicy(name="acme", tokens_per_minute=6000)])
    assert budgets.reserve("r2", "acme", 900, now=10.0).action is Action.ADMIT


def test_what_other_gateways_hold_and_what_their_requests_did_not_use_counts() -> None:
    budgets = make_budgets(tokens_per_minute=1000, max_concurrency=2)
    budgets.set_remote_held("b", {"acme": 1, "other": 5})
    budgets.charge_remote("acme", 600, now=0.0)
    assert budgets.reserve("r1", "acme", 1, now=0.0).reason is FlowReason.TENANT_CONCURRENCY
    budgets.set_remote_held("b", {})
    assert budgets.reserve("r1", "acme", 500, now=0.0).reason is FlowReason.TENANT_TOKENS
    budgets.release_remote("acme", now=0.0, unused_tokens=550)
    assert budgets.level("acme", 0.0) == 950
    assert budgets.reserve("r1", "acme", 500, now=0.0).action is Action.ADMIT


# A limit that several gateway processes share, each knowing late what the others admitted.


class Fleet:
    """Gateway processes that hear of one another's decisions only when `tell` is called."""

    def __init__(self, num: int, **limits: int) -> None:
        self.names = [f"gateway-{number}" for number in range(num)]
        self.books = {name: make_budgets(**limits) for name in self.names}
        self.untold: list[tuple[str, int]] = []
        self.claims: dict[str, list[tuple[str, int]]] = {name: [] for name in self.names}
        self.num_admitted = 0
        self.tokens = 0

    def _note(self, name: str, tokens: int) -> None:
        self.num_admitted += 1
        self.tokens += tokens
        self.untold.append((name, tokens))

    def arrive(self, name: str, request: str, tokens: int, now: float) -> Action:
        verdict = self.books[name].reserve(request, "acme", tokens, now, num_sharers=len(self.names))
        if verdict.action is Action.ADMIT:
            self._note(name, tokens)
        elif verdict.action is Action.HOLD:
            assert verdict.reason is FlowReason.TENANT_SHARE
            self.claims[name].append((request, tokens))
        return verdict.action

    def tell(self, now: float) -> None:
        for name, tokens in self.untold:
            for other in self.names:
                if other != name:
                    self.books[other].charge_remote("acme", tokens, now)
        self.untold.clear()
        for name, claims in self.claims.items():
            told = {"acme": (len(claims), sum(tokens for _, tokens in claims))} if claims else {}
            for other in self.names:
                if other != name:
                    self.books[other].set_remote_held(name, {}, {}, told)

    def settle_claims(self, now: float) -> None:
        """All at one time, before any hears of another's answer."""
        for name, claims in self.claims.items():
            for request, tokens in claims:
                verdict = self.books[name].reserve(
                    request, "acme", tokens, now, num_sharers=len(self.names), claimed_as=name
                )
                assert verdict.action is not Action.HOLD
                if verdict.action is Action.ADMIT:
                    self._note(name, tokens)
            self.claims[name] = []


@given(
    num=st.integers(min_value=1, max_value=8),
    limit=st.integers(min_value=1, max_value=40),
    arrivals=st.lists(st.integers(min_value=0, max_value=7), max_size=80),
)
def test_a_burst_over_many_gateways_gets_the_concurrency_of_one(
    num: int, limit: int, arrivals: list[int]
) -> None:
    fleet = Fleet(num, max_concurrency=limit)
    for number, place in enumerate(arrivals):
        fleet.arrive(fleet.names[place % num], f"r{number}", 1, now=0.0)
    fleet.tell(0.05)
    fleet.settle_claims(0.1)
    assert fleet.num_admitted == min(limit, len(arrivals))


@given(
    num=st.integers(min_value=1, max_value=8),
    limit=st.integers(min_value=100, max_value=3000),
    arrivals=st.lists(st.tuples(st.integers(0, 7), st.integers(1, 400)), max_size=60),
)
def test_a_burst_over_many_gateways_gets_the_tokens_of_one(
    num: int, limit: int, arrivals: list[tuple[int, int]]
) -> None:
    fleet = Fleet(num, tokens_per_minute=limit)
    for number, (place, tokens) in enumerate(arrivals):
        fleet.arrive(fleet.names[place % num], f"r{number}", tokens, now=0.0)
    fleet.tell(0.0)
    fleet.settle_claims(0.0)
    assert fleet.tokens <= limit
    if sum(tokens for _, tokens in arrivals) <= limit:
        assert fleet.num_admitted == len(arrivals)


def test_within_its_share_a_gateway_asks_nobody() -> None:
    fleet = Fleet(4, max_concurrency=64, tokens_per_minute=100_000)
    for number in range(64):
        assert fleet.arrive(fleet.names[number % 4], f"r{number}", 100, now=0.0) is Action.ADMIT
    fleet.tell(0.05)
    assert fleet.arrive(fleet.names[0], "late", 100, now=0.1) is Action.SHED


def test_alone_a_gateway_never_waits() -> None:
    fleet = Fleet(1, max_concurrency=3)
    actions = [fleet.arrive(fleet.names[0], f"r{number}", 1, now=0.0) for number in range(4)]
    assert actions == [Action.ADMIT] * 3 + [Action.SHED]


def test_what_others_hold_is_charged_and_what_they_claim_is_not() -> None:
    budgets = make_budgets(tokens_per_minute=1000)
    budgets.set_remote_held("b", {"acme": 1}, {"acme": 700}, {"acme": (1, 200)})
    assert budgets.reserve("r1", "acme", 400, now=0.0).reason is FlowReason.TENANT_TOKENS
    assert budgets.reserve("r1", "acme", 300, now=0.0).action is Action.ADMIT
    assert budgets.level("acme", 0.0) == 700


@given(st.lists(st.tuples(st.floats(0, 240), st.integers(1, 700)), max_size=60))
def test_tokens_of_any_span_of_time_are_the_full_bucket_and_what_refilled(
    arrivals: list[tuple[float, int]],
) -> None:
    """There are no slots, so nothing is gained at the boundary of one."""
    budgets = make_budgets(tokens_per_minute=600)
    admitted: list[tuple[float, int]] = []
    for number, (at, tokens) in enumerate(sorted(arrivals)):
        if budgets.reserve(f"r{number}", "acme", tokens, now=at).action is Action.ADMIT:
            budgets.settle(f"r{number}", tokens, now=at)
            admitted.append((at, tokens))
    for first, (begin, _) in enumerate(admitted):
        total = 0
        for at, tokens in admitted[first:]:
            total += tokens
            assert total <= 600 + (at - begin) * 10 + 1e-6
