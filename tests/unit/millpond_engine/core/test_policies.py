"""What an accepted policy name promises: order, shares, gates, caps."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest
from tests.unit.millpond_engine.core.harness import Loop, make_request

from millpond_common.contract.engine_config import ClassConfig, SchedulingConfig, TenantConfig
from millpond_engine.commands.scheduling import make_settings
from millpond_engine.records.capacity import Capacity
from millpond_engine.records.request import RefusalReason, WaitReason
from millpond_engine.records.settings import ClassRule, SchedulerSettings, TenantRule

HIGH_LOW = (ClassRule("high", priority=5), ClassRule("low", priority=1))


def make_loop(policy: str, *, slots: int = 1, num_blocks: int = 400, budget: int = 2048, **rest) -> Loop:
    capacity = Capacity(num_blocks=num_blocks, block_tokens=4, max_model_tokens=1024)
    settings = SchedulerSettings(policy=policy, max_sequences=slots, max_batch_tokens=budget, **rest)
    return Loop(settings, capacity, check=False)


def serve(loop: Loop, *requests) -> list[str]:
    for request in requests:
        assert loop.add(request) is None
    loop.run()
    return loop.finished


def test_fifo_is_arrival_order():
    requests = [make_request(f"r{i}", 4, 2, arrival_seconds=i, priority=-i) for i in (3, 1, 2, 0)]
    assert serve(make_loop("Fifo"), *requests) == ["r0", "r1", "r2", "r3"]


def test_priority_is_class_then_number_then_arrival():
    loop = make_loop("Priority", classes=HIGH_LOW)
    requests = [
        make_request("low-urgent", 4, 2, class_name="low", priority=-9, arrival_seconds=0),
        make_request("high-late", 4, 2, class_name="high", arrival_seconds=2),
        make_request("high-early", 4, 2, class_name="high", arrival_seconds=1),
        make_request("high-urgent", 4, 2, class_name="high", priority=-1, arrival_seconds=3),
    ]
    assert serve(loop, *requests) == ["high-urgent", "high-early", "high-late", "low-urgent"]


def test_deadline_is_earliest_first_with_class_targets_and_a_starvation_bound():
    classes = (ClassRule("chat", ttft_seconds=0.5),)
    loop = make_loop("Deadline", classes=classes, default_class="chat", starvation_seconds=10.0)
    requests = [
        make_request("patient", 4, 2, deadline_seconds=99.0, arrival_seconds=0.0),  # counts as due at 10
        make_request("default", 4, 2, arrival_seconds=4.0),  # due at 4.5
        make_request("urgent", 4, 2, deadline_seconds=4.2, arrival_seconds=4.0),
        make_request("later", 4, 2, deadline_seconds=10.5, arrival_seconds=9.0),
    ]
    assert serve(loop, *requests) == ["urgent", "default", "patient", "later"]


def test_longest_prefix_goes_first_until_somebody_starves():
    def fill(now: float) -> Loop:
        loop = make_loop("LongestPrefix", starvation_seconds=10.0)
        warm = make_request("warm", list(range(40)), 1)
        serve(loop, warm)
        loop.now = now
        loop.add(make_request("cold", 40, 2, arrival_seconds=0.0))
        loop.add(make_request("half", [*range(20), 900], 2, arrival_seconds=now))
        loop.add(make_request("full", list(range(40)), 2, arrival_seconds=now))
        loop.run()
        return loop

    assert fill(1.0).finished == ["warm", "full", "half", "cold"]
    assert fill(11.0).finished == ["warm", "cold", "full", "half"]


def test_longest_prefix_falls_back_to_arrival_on_long_queues():
    loop = make_loop("LongestPrefix", max_prefix_sorted=2)
    serve(loop, make_request("warm", list(range(40)), 1))
    names = [f"cold{i}" for i in range(3)]
    serve(
        loop,
        *(make_request(name, 8, 2, arrival_seconds=i) for i, name in enumerate(names)),
        make_request("full", list(range(40)), 2, arrival_seconds=9.0),
    )
    assert loop.finished[1] == "cold0"


@pytest.mark.parametrize(("weight", "share"), [(1, 0.5), (3, 0.75)])
def test_fair_share_gives_tenants_tokens_by_weight(weight, share):
    loop = make_loop("FairShare", slots=2, tenants=(TenantRule("heavy", weight=weight), TenantRule("light")))
    for i in range(300):
        tenant = "heavy" if i % 2 else "light"
        loop.add(make_request(f"{tenant}{i}", 20, 5, tenant=tenant, arrival_seconds=float(i)))
    loop.run_steps(250)
    tokens = {account.tenant: account.tokens for account in loop.state.accounts.values()}
    assert tokens["heavy"] / sum(tokens.values()) == pytest.approx(share, abs=0.03)


def test_fair_share_is_not_swayed_by_how_many_requests_a_tenant_sends():
    loop = make_loop("FairShare", slots=2)
    for i in range(200):
        loop.add(make_request(f"flood{i}", 20, 5, tenant="flood", arrival_seconds=0.0))
    for i in range(10):
        loop.add(make_request(f"few{i}", 20, 5, tenant="few", arrival_seconds=1.0))
    while sum(name.startswith("few") for name in loop.finished) < 10:
        loop.step()
    assert len(loop.finished) <= 24


def test_an_idle_tenant_earns_no_credit():
    loop = make_loop("FairShare", slots=1)
    serve(loop, *(make_request(f"busy{i}", 20, 5, tenant="busy") for i in range(20)))
    for i in range(10):
        loop.add(make_request(f"busy-more{i}", 20, 5, tenant="busy", arrival_seconds=5.0))
    loop.step()
    for i in range(10):
        loop.add(make_request(f"idle{i}", 20, 5, tenant="idle", arrival_seconds=6.0))
    while len(loop.finished) < 30:
        loop.step()
    served = loop.finished[20:]
    assert 4 <= sum(name.startswith("idle") for name in served) <= 6


def test_a_tenants_requests_beyond_its_cap_wait_with_that_reason():
    loop = make_loop("FairShare", slots=8, tenants=(TenantRule("capped", max_concurrency=2),))
    for i in range(5):
        loop.add(make_request(f"capped{i}", 4, 6, tenant="capped"))
    loop.add(make_request("other", 4, 6, tenant="other"))
    loop.step()
    assert loop.scheduler.counts().num_running == 3
    (queue,) = [queue for queue in loop.scheduler.counts().queues if queue.tenant == "capped"]
    assert queue.running == 2
    assert queue.waiting == {WaitReason.TENANT_CAP.value: 3}
    peak = 0
    while loop.scheduler.has_work():
        loop.step()
        peak = max(peak, loop.state.count_running("capped"))
    assert peak == 2
    assert len(loop.finished) == 6


def test_a_gated_class_waits_while_the_other_queue_is_long():
    classes = (ClassRule("chat", priority=1), ClassRule("batch", gate_class="chat", gate_below=2))
    loop = make_loop("Priority", slots=2, classes=classes)
    loop.add(make_request("batch", 4, 3, class_name="batch"))
    for i in range(4):
        loop.add(make_request(f"chat{i}", 4, 3, class_name="chat"))
    loop.step()
    reasons = {queue.class_name: queue.waiting for queue in loop.scheduler.counts().queues}
    assert reasons["batch"] == {WaitReason.CLASS_GATE.value: 1} or reasons["chat"]
    loop.run()
    assert loop.finished[-1] == "batch"


def test_reserved_blocks_stay_free_for_their_class():
    classes = (ClassRule("chat", priority=1, reserved_percent=50), ClassRule("batch"))
    loop = make_loop("Priority", slots=8, num_blocks=40, classes=classes)
    for i in range(4):
        loop.add(make_request(f"batch{i}", 36, 2, class_name="batch"))
    loop.step()
    assert loop.scheduler.counts().num_running == 2, "a third one would enter the reserved half"
    refusal = loop.add(make_request("never", 84, 1, class_name="batch"))
    assert refusal is not None
    assert refusal.reason is RefusalReason.KV_CAPACITY_EXCEEDED
    loop.add(make_request("chat", 76, 2, class_name="chat"))
    loop.step()
    assert loop.state.groups["chat"].running
    loop.run()
    assert len(loop.finished) == 5


def test_a_class_stays_within_its_share():
    classes = (ClassRule("chat", priority=1), ClassRule("agent", max_share_percent=50))
    loop = make_loop("Priority", slots=8, num_blocks=40, classes=classes)
    for i in range(4):
        loop.add(make_request(f"agent{i}", 36, 4, class_name="agent"))
    while loop.scheduler.has_work():
        loop.step()
        used = sum(len(s.table) for s in loop.state.running if s.group.rule.name == "agent")
        assert used <= 20
    assert len(loop.finished) == 4


def test_settings_take_over_the_configuration_file():
    config = SchedulingConfig(
        max_batch_tokens=512,
        max_sequences=32,
        policy="Deadline",
        preemption="Swap",
        classes=(
            ClassConfig("chat", priority=3, ttft_milliseconds=700, reserved_kv_percent=30),
            ClassConfig(
                "batch", max_share_percent=50, admit_while_queued_class="chat", admit_while_queued_below=4
            ),
        ),
        default_class="chat",
        tenants=(TenantConfig("acme", weight=3, max_concurrency=64, max_cache_percent=40),),
    )
    settings = make_settings(config, base_seed=9)
    assert (settings.max_batch_tokens, settings.max_sequences, settings.base_seed) == (512, 32, 9)
    assert (settings.policy, settings.preemption, settings.default_class) == ("Deadline", "Swap", "chat")
    assert settings.classes == (
        ClassRule("chat", priority=3, ttft_seconds=0.7, reserved_percent=30),
        ClassRule("batch", max_share_percent=50, gate_class="chat", gate_below=4),
    )
    assert settings.tenants == (TenantRule("acme", 3, 64, 40),)


def test_every_policy_of_the_configuration_file_exists():
    policies = get_args(get_type_hints(SchedulingConfig)["policy"])
    assert len(policies) >= 4
    for policy in policies:
        assert serve(make_loop(policy), make_request("r", 4, 2)) == ["r"]
