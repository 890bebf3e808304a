from __future__ import annotations

import pytest

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
