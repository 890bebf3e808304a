from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond_common.contract.reasons import ScalingReason
from millpond_operator.scaling.decide import MAX_STEP, decide
from millpond_operator.scaling.learn import (
    CapacityEstimate,
    Interval,
    compute_horizon,
    learn_capacity,
)
from millpond_operator.scaling.needs import find_rate
from millpond_operator.scaling.records import (
    Capacity,
    Decision,
    Demand,
    KvLoad,
    Recommended,
    ScalingLimits,
    ScalingSnapshot,
    Supply,
)
from millpond_operator.scaling.roles import RolePlan, fit_budget
from millpond_operator.scaling.victim import Candidate, rank_victims

NOW = 10_000.0
H = 100.0
LIMITS = ScalingLimits(min_replicas=1, max_replicas=10, kv_percent=80)
QUIET = (Recommended(NOW - 400, 1),)


def demand(rate: float | None, **changes: object) -> Demand:
    base = Demand(
        observed_at=NOW - 5,
        gateways_reporting=2,
        gateways_expected=2,
        uncached_per_second_15=rate,
        uncached_per_second_60=rate,
        output_per_second=0.0,
        held_tokens=0,
        queued_tokens=0,
        idle_seconds=0.0,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def kv(used: int, *, at: float = NOW - 5) -> KvLoad:
    return KvLoad(at, used, blocks_per_replica=1000, replicas_reporting=2)


def snapshot(rate: float | None, *, ready: int, **changes: object) -> ScalingSnapshot:
    base = ScalingSnapshot(
        limits=LIMITS,
        supply=Supply(ready),
        demand=demand(rate),
        kv=kv(0),
        capacity=Capacity(1000.0, 500.0),
        horizon_seconds=H,
        history=QUIET,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def history(*replicas: int) -> tuple[Recommended, ...]:
    step = 400 / max(len(replicas) - 1, 1)
    return tuple(Recommended(NOW - 400 + i * step, r) for i, r in enumerate(replicas))


def test_as_001_token_demand_scales_up_although_kv_is_low() -> None:
    # 8 requests/s of 6,000 prompt tokens against 20,000 tokens/s a replica; KV use stays at 0.32.
    busy = snapshot(48_000.0, ready=2, capacity=Capacity(20_000.0), kv=kv(320 * 2))
    decision = decide(busy, NOW)
    assert decision.replicas == 3
    assert decision.reason is ScalingReason.PREFILL_DEMAND


def test_as_002_an_idle_fleet_never_moves() -> None:
    idle = snapshot(0.0, ready=1, demand=demand(0.0, idle_seconds=5_000.0))
    now = NOW
    for _ in range(2880):  # 24 hours of 30-second loops
        now += 30
        fresh = replace(idle, demand=demand(0.0, observed_at=now, idle_seconds=now), kv=kv(0, at=now))
        assert decide(fresh, now).replicas == 1


def test_as_003_samples_of_a_cold_replica_are_excluded() -> None:
    estimate = CapacityEstimate(samples=(1000.0,) * 20)
    for _ in range(20):
        estimate = learn_capacity(estimate, Interval(200.0, 1.0, age_seconds=30.0), ttft_target=None)
    assert estimate.prefill_per_second == pytest.approx(1000.0, rel=0.05)


def test_as_004_an_unreachable_ttft_target_holds_and_is_named() -> None:
    limits = replace(LIMITS, ttft_milliseconds=50)
    idle = snapshot(
        100.0, ready=1, limits=limits, capacity=Capacity(1000.0, 500.0, reachable_ttft_milliseconds=90.0)
    )
    idle = replace(idle, demand=demand(100.0, ttft_milliseconds=90.0))
    decision = decide(idle, NOW)
    assert decision.replicas == 1
    assert ScalingReason.TARGET_UNREACHABLE in decision.bounds


def test_as_006_pending_replicas_are_supply() -> None:
    first = decide(snapshot(3_000.0, ready=2), NOW)
    assert first.replicas == 4
    later = snapshot(3_000.0, ready=2, supply=Supply(2, pending_ages=(30.0, 30.0)))
    assert decide(later, NOW).replicas == 4


def test_as_007_pending_replicas_go_first_when_load_is_gone() -> None:
    gone = snapshot(
        20.0, ready=2, supply=Supply(2, pending_ages=(900.0,) * 4), limits=replace(LIMITS, min_replicas=1)
    )
    assert decide(replace(gone, history=history(1, 1)), NOW).replicas == 1
    # While the window still remembers two, only the pending ones go.
    assert decide(replace(gone, history=history(1, 2)), NOW).replicas == 2


def test_as_008_a_replica_pending_for_an_hour_blocks_nothing() -> None:
    stuck = Supply(1, pending_ages=(3600.0,))
    assert decide(snapshot(10.0, ready=1, supply=stuck), NOW).replicas == 1
    loaded = decide(snapshot(1_500.0, ready=1, supply=stuck), NOW)
    assert loaded.replicas == 3  # two are needed, the stuck one is not counted, and it is named
    assert ScalingReason.PENDING_SUSPECT in loaded.bounds


def test_as_008_a_suspect_and_what_stands_in_for_it_do_not_take_turns() -> None:
    stuck = snapshot(100.0, ready=0, supply=Supply(0, pending_ages=(900.0,)))
    assert decide(stuck, NOW).replicas == 2
    both = replace(stuck, supply=Supply(0, pending_ages=(900.0, 15.0)))
    held = decide(both, NOW)
    assert (held.replicas, held.bounds) == (2, (ScalingReason.PENDING_SUSPECT,))
    served = replace(stuck, supply=Supply(1, pending_ages=(915.0,)))
    assert decide(served, NOW).replicas == 1, "cancelled once the other one is ready"


def test_as_009_one_unready_replica_does_not_stop_decisions() -> None:
    partial = snapshot(
        200.0, ready=4, supply=Supply(4, pending_ages=(50.0,)), kv=replace(kv(100), replicas_reporting=4)
    )
    assert decide(partial, NOW).replicas < 5


@pytest.mark.parametrize("loads", [None, kv(10, at=NOW - 300)])
def test_as_010_a_missing_input_holds(loads: KvLoad | None) -> None:
    decision = decide(snapshot(10.0, ready=3, kv=loads), NOW)
    assert decision.replicas == 3
    assert decision.reason in {ScalingReason.NO_DATA, ScalingReason.STALE_DATA}


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (None, ScalingReason.NO_DATA),
        (demand(None), ScalingReason.NO_DATA),
        (demand(0.0, observed_at=NOW - 120), ScalingReason.STALE_DATA),
        (demand(0.0, gateways_reporting=1), ScalingReason.PARTIAL_DATA),
    ],
)
def test_as_011_absence_is_never_read_as_zero(seen: Demand | None, reason: ScalingReason) -> None:
    decision = decide(snapshot(0.0, ready=7, demand=seen), NOW)
    assert decision.replicas == 7
    assert decision.reason is reason


def test_as_012_gaps_hold_without_flapping() -> None:
    counts = []
    for loop in range(30):
        seen = demand(2_000.0, observed_at=NOW) if loop % 3 == 0 else None
        counts.append(decide(snapshot(0.0, ready=3, demand=seen), NOW).replicas)
    assert set(counts) == {3}


def test_as_013_two_replicas_at_kv_70_percent_stay_two() -> None:
    decision = decide(snapshot(10.0, ready=2, kv=kv(1_400), history=history(1, 1)), NOW)
    assert decision.replicas == 2


def test_as_015_a_finished_burst_is_back_at_the_floor_after_the_window() -> None:
    assert decide(snapshot(0.0, ready=8, history=history(8, 8)), NOW).replicas == 8
    assert decide(snapshot(0.0, ready=8, history=history(1, 1)), NOW).replicas == 1


def test_as_016_prefill_heavy_load_grows_prefill_only() -> None:
    heavy = demand(20 * 300.0, output_per_second=40.0)
    prefill = snapshot(
        0.0, ready=2, demand=heavy, capacity=Capacity(1_500.0, None), limits=replace(LIMITS, kv_percent=None)
    )
    decode = snapshot(0.0, ready=2, demand=replace(heavy, uncached_per_second_15=0.0, uncached_per_second_60=0.0),
                      capacity=Capacity(1_500.0, 100.0), limits=replace(LIMITS, kv_percent=None))  # fmt: skip
    assert decide(prefill, NOW).replicas == 5
    assert decide(decode, NOW).replicas <= 2


def test_as_017_one_budget_is_never_passed_at_any_instant() -> None:
    def plan(wanted: int, current: int) -> RolePlan:
        return RolePlan(
            Decision(wanted, wanted, ScalingReason.PREFILL_DEMAND), current, devices_per_replica=1
        )

    prefill, decode = fit_budget(plan(6, 4), plan(2, 4), budget=8)
    assert (prefill.replicas, decode.replicas) == (4, 2)  # down first; the freed GPUs serve the next loop
    assert ScalingReason.BUDGET in prefill.bounds
    prefill, decode = fit_budget(plan(6, 4), plan(2, 2), budget=8)
    assert (prefill.replicas, decode.replicas) == (6, 2)


def test_as_018_the_replica_with_the_common_prefix_stays() -> None:
    def candidate(pod: str, cached: int, rate: float) -> Candidate:
        return Candidate(pod, is_ready=True, cached_value=cached * rate, open_requests=1)

    fleet = [
        candidate("a", 6000, 0.6),
        candidate("b", 9000, 0.1),
        candidate("c", 100, 0.1),
        candidate("d", 200, 0.1),
    ]
    assert [c.pod for c in rank_victims(fleet)] == ["c", "d", "b", "a"]
    guarded = snapshot(600.0, ready=2, victim_reuse_per_second=(600.0, 900.0), history=history(1, 1))
    decision = decide(guarded, NOW)
    assert decision.replicas == 2
    assert ScalingReason.CACHED_VALUE in decision.bounds
    # One of three may go: what it saved fits the other two; the next one's would not fit the last.
    three = replace(guarded, supply=Supply(3), victim_reuse_per_second=(50.0, 600.0, 900.0))
    assert decide(three, NOW).replicas == 2
    worthless = replace(guarded, victim_reuse_per_second=(0.0, 900.0))
    assert decide(worthless, NOW).replicas == 1


def test_pending_replicas_leave_before_ready_ones_and_no_zone_is_emptied() -> None:
    fleet = [
        Candidate("warm", is_ready=True, cached_value=9, open_requests=3, zone="a"),
        Candidate("alone", is_ready=True, cached_value=0, open_requests=0, zone="b"),
        Candidate("also", is_ready=True, cached_value=5, open_requests=0, zone="a"),
        Candidate("pending", is_ready=False, cached_value=0, open_requests=0, zone="b"),
    ]
    assert [c.pod for c in rank_victims(fleet)] == ["pending", "also", "alone", "warm"], (
        "one of each zone is left, and of these the less valuable goes first"
    )


def test_several_that_leave_at_once_empty_no_zone() -> None:
    def make(pod: str, value: float, zone: str) -> Candidate:
        return Candidate(pod, is_ready=True, cached_value=value, open_requests=0, zone=zone)

    fleet = [make("a1", 1, "a"), make("a2", 2, "a"), make("b1", 3, "b"), make("b2", 4, "b"), make("x", 5, "")]
    assert [c.pod for c in rank_victims(fleet)] == ["a1", "b1", "x", "a2", "b2"], (
        "one of each zone stays longest"
    )
    one_zone = [make("a1", 1, "a"), make("a2", 2, "a"), make("x", 0, "")]
    assert [c.pod for c in rank_victims(one_zone)] == ["x", "a1", "a2"]


@pytest.mark.parametrize(
    ("starts", "expected"), [((), 300.0), ((1200.0,) * 9, 1200.0), ((20.0,) * 9, 20.0), ((20.0,), 300.0)]
)
def test_as_021_as_022_the_horizon_is_the_measured_start_time(
    starts: tuple[float, ...], expected: float
) -> None:
    assert compute_horizon(starts) == expected


def test_a_pool_at_zero_wakes_on_held_requests_and_sleeps_only_with_all_gateways() -> None:
    limits = replace(LIMITS, min_replicas=0, idle_seconds=600.0)
    asleep = snapshot(0.0, ready=0, limits=limits, demand=demand(None, held_requests=1, held_tokens=50))
    assert decide(asleep, NOW).replicas == 1
    assert decide(asleep, NOW).reason is ScalingReason.HELD_DEMAND
    idle = snapshot(0.0, ready=2, limits=limits, demand=demand(0.0, idle_seconds=700.0))
    assert decide(idle, NOW).replicas == 0
    partial = replace(idle, demand=demand(0.0, idle_seconds=700.0, gateways_reporting=1))
    assert decide(partial, NOW).replicas == 2
    stays = replace(idle, supply=Supply(0))
    assert decide(stays, NOW).replicas == 0


def test_op_067_the_sum_over_the_fleet_decides_about_zero() -> None:
    limits = replace(LIMITS, min_replicas=0, idle_seconds=600.0)
    busy = snapshot(5.0, ready=1, limits=limits, demand=demand(5.0, idle_seconds=2.0))
    assert decide(busy, NOW).replicas == 1


def test_op_068_after_a_restart_the_count_stays_until_history_is_there() -> None:
    decision = decide(snapshot(100.0, ready=7, history=()), NOW)
    assert decision.replicas == 7
    assert ScalingReason.STABILIZING in decision.bounds


def test_backlog_adds_what_the_free_share_cannot_work_off() -> None:
    # max(3000/0.8, 3000 + 400000/200) / 2000 = 2.5 replicas
    busy = snapshot(3_000.0, ready=1, capacity=Capacity(2_000.0), demand=demand(3_000.0, held_tokens=400_000))
    assert decide(busy, NOW).replicas == 3
    small = snapshot(3_000.0, ready=2, capacity=Capacity(2_000.0), demand=demand(3_000.0, held_tokens=40_000))
    assert decide(small, NOW).replicas == 2


def test_growth_is_limited_per_loop_and_by_the_maximum() -> None:
    limits = replace(LIMITS, max_replicas=40)
    decision = decide(snapshot(24_000.0, ready=2, limits=limits), NOW)
    assert decision.replicas == 6
    assert ScalingReason.RATE_LIMIT in decision.bounds
    capped = decide(snapshot(24_000.0, ready=8), NOW)
    assert capped.replicas == 10
    assert ScalingReason.MAX_REPLICAS in capped.bounds


def test_a_warm_floor_is_named_and_holds_a_fleet() -> None:
    raised = decide(snapshot(100.0, ready=1, warm_floor=3), NOW)
    assert (raised.replicas, raised.reason) == (3, ScalingReason.WARM_FLOOR)
    held = decide(snapshot(100.0, ready=3, warm_floor=3), NOW)
    assert (held.replicas, held.bounds) == (3, (ScalingReason.WARM_FLOOR,))
    lowered = decide(snapshot(100.0, ready=6, warm_floor=3), NOW)
    assert (lowered.replicas, lowered.bounds) == (3, (ScalingReason.WARM_FLOOR,))
    needed = decide(snapshot(2_300.0, ready=3, warm_floor=3), NOW)
    assert ScalingReason.WARM_FLOOR not in needed.bounds
    zero = replace(LIMITS, min_replicas=0, idle_seconds=600.0)
    idle = snapshot(0.0, ready=3, warm_floor=3, limits=zero, demand=demand(0.0, idle_seconds=700.0))
    assert decide(idle, NOW).replicas == 0, "bursts that have ended keep nothing from zero"


RATES = st.floats(0, 50_000, allow_nan=False)


@st.composite
def snapshots(draw: st.DrawFn) -> ScalingSnapshot:
    low = draw(st.integers(0, 3))
    limits = ScalingLimits(low, draw(st.integers(max(low, 1), 20)), draw(st.none() | st.integers(100, 9_000)),
                           draw(st.none() | st.integers(10, 95)), None, 300.0, draw(st.none() | st.just(600.0)))  # fmt: skip
    outputs = draw(st.none() | RATES)
    seen = demand(draw(st.none() | RATES), output_per_second=outputs, held_tokens=draw(st.integers(0, 10_000)), idle_seconds=draw(st.none() | st.sampled_from([0.0, 700.0])),
                  gateways_reporting=draw(st.integers(1, 2)), observed_at=NOW - draw(st.sampled_from([1, 20, 100])))  # fmt: skip
    return ScalingSnapshot(
        limits=limits,
        supply=Supply(draw(st.integers(0, 12)), tuple(draw(st.lists(st.floats(0, 5_000), max_size=5)))),
        demand=draw(st.sampled_from([seen, None])),
        kv=draw(st.none() | st.builds(kv, st.integers(0, 9_000))),
        capacity=Capacity(draw(st.none() | st.just(1_000.0)), draw(st.none() | st.just(400.0))),
        horizon_seconds=H,
        axes=draw(st.sampled_from(["Both", "Prefill", "Decode"])),
        history=draw(st.sampled_from([(), QUIET, history(1, 5, 2)])),
        warm_floor=draw(st.integers(0, 6)),
        victim_reuse_per_second=tuple(draw(st.lists(st.floats(0, 3_000), max_size=12))),
    )


@given(snapshots())
def test_a_decision_is_bounded_and_repeatable(case: ScalingSnapshot) -> None:
    decision = decide(case, NOW)
    assert case.limits.min_replicas <= decision.replicas <= case.limits.max_replicas
    assert decide(case, NOW) == decision
    assert decision.message
    supply, low = case.supply, case.limits.min_replicas
    assert decision.replicas <= max(supply.wanted + max(MAX_STEP, supply.wanted), low)
    # Growth ends at what is recommended; a suspect replica still counts against the maximum, so it comes on top.
    asked = decision.recommendation + supply.count_suspect(case.horizon_seconds)
    assert decision.replicas <= max(supply.wanted, asked, low)


RISES = st.sampled_from(["prompts", "outputs", "held", "queued", "blocks"])


def raise_load(case: ScalingSnapshot, what: str, extra: float) -> ScalingSnapshot | None:
    """The same pool under more load of one kind; None where that load is not known."""
    seen, loads = case.demand, case.kv
    if what == "blocks":
        return replace(case, kv=replace(loads, used_blocks=loads.used_blocks + int(extra))) if loads else None
    if seen is None or seen.uncached_per_second_15 is None or seen.output_per_second is None:
        return None
    rate = seen.uncached_per_second_15 + extra
    changes: dict[str, dict[str, object]] = {
        "prompts": {"uncached_per_second_15": rate, "uncached_per_second_60": rate},
        "outputs": {"output_per_second": seen.output_per_second + extra},
        "held": {"held_tokens": seen.held_tokens + int(extra)},
        "queued": {"queued_tokens": seen.queued_tokens + int(extra)},
    }
    return replace(case, demand=replace(seen, **changes[what]))  # type: ignore[arg-type]


@given(snapshots(), RISES, RATES)
def test_more_load_of_any_kind_never_means_fewer_replicas(
    case: ScalingSnapshot, what: str, extra: float
) -> None:
    more = raise_load(case, what, extra)
    if more is not None:
        assert decide(more, NOW).replicas >= decide(case, NOW).replicas


BLINDNESS = st.sampled_from(["demand", "rate", "stale", "partial", "kv", "kv stale", "capacity"])


def blind(case: ScalingSnapshot, what: str) -> ScalingSnapshot:
    """The same pool with one input missing, or too old, or from some gateways only."""
    seen = case.demand or demand(0.0)
    rates = {"uncached_per_second_15": None, "uncached_per_second_60": None, "output_per_second": None}
    made: dict[str, ScalingSnapshot] = {
        "demand": replace(case, demand=None),
        "rate": replace(case, demand=replace(seen, **rates)),  # type: ignore[arg-type]
        "stale": replace(case, demand=replace(seen, observed_at=NOW - 31.0)),
        "partial": replace(case, demand=replace(seen, gateways_reporting=1)),
        "kv": replace(case, kv=None),
        "kv stale": replace(case, kv=kv(0, at=NOW - 31.0)),
        "capacity": replace(case, capacity=Capacity()),
    }
    return made[what]


@given(snapshots(), BLINDNESS)
def test_absence_of_any_input_never_lowers_a_count(case: ScalingSnapshot, what: str) -> None:
    seen = blind(case, what)
    rate = find_rate(seen)
    if what.startswith("kv") and (
        case.limits.kv_percent is None or case.axes == "Prefill" or not seen.supply.ready
    ):
        return  # the input is not asked for
    if what == "capacity" and rate == 0:
        return  # without demand any capacity will do
    idle = seen.limits.idle_seconds is not None and seen.demand is not None and what.startswith("kv")
    if idle and seen.demand and (seen.demand.idle_seconds or 0.0) >= 600:
        return  # a pool nobody has asked for goes to zero, however full its cache is
    assert decide(seen, NOW).replicas >= min(seen.supply.wanted, seen.limits.max_replicas)


@given(snapshots())
def test_carrying_out_a_decision_settles(case: ScalingSnapshot) -> None:
    """The same observation with the decided count as supply asks for no further change."""
    decision = decide(case, NOW)
    if ScalingReason.RATE_LIMIT in decision.bounds:
        return
    if ScalingReason.CACHED_VALUE in decision.bounds:
        return  # what the caches of those that left had saved is demand from then on: not the same observation
    assert decide(carry_out(case, decision.replicas), NOW).replicas == decision.replicas


def carry_out(case: ScalingSnapshot, count: int) -> ScalingSnapshot:
    """The pool at `count`: new replicas are pending; pending ones leave first, youngest first, then the victims."""
    ready, ages = case.supply.ready, sorted(case.supply.pending_ages, reverse=True)
    kept_ready = min(ready, count)
    added = max(0, count - case.supply.wanted)
    pending = (*ages[: max(0, count - kept_ready)], *(0.0,) * added)
    left = case.victim_reuse_per_second[ready - kept_ready :]
    return replace(case, supply=Supply(kept_ready, pending), victim_reuse_per_second=left)
