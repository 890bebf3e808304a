"""The exposition, parsed by Prometheus' own parser, against what clients were told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.engine_server import Running, Setup, run_engine

from millpond_common.contract import headers, metrics
from millpond_common.contract.engine_config import (
    ClassConfig,
    EngineConfig,
    PriceConfig,
    SchedulingConfig,
    TenantConfig,
)
from millpond_engine.fake.cost import CostModel

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def scrape(engine: Running) -> Samples:
    status, text = await engine.get("/metrics")
    assert status == 200
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in samples, f"{key} twice"
            samples[key] = sample.value
    return samples


def total(samples: Samples, name: str, **labels: str) -> float:
    """Sum over the series of a name that have these labels."""
    wanted = set(labels.items())
    found = [v for (n, given), v in samples.items() if n == name and wanted <= set(given)]
    assert found, f"no series {name} {labels}"
    return sum(found)


def names(samples: Samples) -> Iterator[str]:
    return iter({name for name, _ in samples})


async def test_every_family_is_there_from_the_start_and_nothing_is_misnamed() -> None:
    async with run_engine() as engine:
        _, text = await engine.get("/metrics")
        families = {family.name: family for family in text_string_to_metric_families(text)}
        samples = await scrape(engine)
    expected = [*metrics.make_vllm_families(1024).values(), *metrics.make_engine_families().values()]
    absent = {"millpond_engine_cost_total"}  # no price is configured
    for family in expected:
        if family.name in absent:
            continue
        name = family.name.removesuffix("_total") if family.kind == "counter" else family.name
        assert name in families, name
        assert families[name].type == family.kind
    assert not any(name.endswith(("_created", "_total_total")) for name in names(samples))
    assert "# TYPE vllm:iteration_tokens_total histogram" in text
    for (name, labels), value in samples.items():
        if name.startswith("vllm:") and name not in {"vllm:cache_config_info", "vllm:lora_requests_info"}:
            assert dict(labels)["model_name"] == "fake"
        if name.endswith("_total") and "gpu_seconds" not in name:
            assert value == 0, (name, labels)


async def test_closed_label_sets_exist_at_zero() -> None:
    async with run_engine() as engine:
        samples = await scrape(engine)
    for reason in metrics.VLLM_FINISH_REASONS:
        assert total(samples, "vllm:request_success_total", finished_reason=reason) == 0
    for outcome in metrics.OUTCOMES:
        assert total(samples, "millpond_engine_requests_total", outcome=outcome) == 0
    for reason in metrics.WAIT_REASONS:
        assert total(samples, "millpond_engine_num_requests_waiting", reason=reason) == 0
    for class_name in ("interactive", "agent", "batch"):
        assert (
            total(samples, "millpond_engine_time_to_first_token_seconds_count", **{"class": class_name}) == 0
        )


async def test_eng_081_one_first_token_per_request_however_it_is_chunked() -> None:
    setup = Setup(scheduling=SchedulingConfig(max_batch_tokens=16))
    async with run_engine(setup) as engine:
        for number in range(5):
            await engine.complete(prompt=f"{number}" * 200, max_tokens=4, n=2, temperature=1)
        await engine.settle()
        samples = await scrape(engine)
        assert total(samples, "vllm:time_to_first_token_seconds_count") == 5
        assert total(samples, "millpond_engine_time_to_first_token_seconds_count") == 5
        assert total(samples, "vllm:inter_token_latency_seconds_count") == 5 * 2 * 3
        assert total(samples, "vllm:generation_tokens_total") == 5 * 2 * 4
        assert total(samples, "vllm:e2e_request_latency_seconds_count") == 5


async def test_eng_082_a_prefix_query_counts_once_however_long_it_waits() -> None:
    setup = Setup(num_blocks=40, max_model_tokens=512, cost=CostModel(decode_step_seconds=0.001))
    async with run_engine(setup) as engine:
        bodies = [{"prompt": f"{i}" * 250, "max_tokens": 30} for i in range(8)]  # 18 blocks each: two fit
        await asyncio.gather(*[engine.complete(**body) for body in bodies])
        samples = await scrape(engine)
        assert total(samples, "vllm:prefix_cache_queries_total") == 8 * 250
        assert total(samples, "millpond_engine_prefix_cache_query_tokens_total") == 8 * 250


async def test_eng_083_an_aborted_request_counts_its_work_and_one_outcome() -> None:
    async with run_engine(Setup(output_tokens=900, cost=CostModel(decode_step_seconds=0.005))) as engine:
        async with engine.session.post(
            engine.url + "/v1/completions", json={"prompt": "x" * 50, "max_tokens": 900, "stream": True}
        ) as response:
            for _ in range(10):
                await response.content.readuntil(b"\n\n")
            response.close()
        await engine.settle()
        samples = await scrape(engine)
        assert total(samples, "vllm:prompt_tokens_total") == 50
        generated = total(samples, "vllm:generation_tokens_total")
        assert generated >= 10
        assert total(samples, "vllm:request_success_total", finished_reason="abort") == 1
        assert total(samples, "millpond_engine_requests_total", outcome="cancelled") == 1
        assert total(samples, "millpond_engine_requests_total") == 1
        assert total(samples, "vllm:request_generation_tokens_count") == 1
        assert total(samples, "vllm:request_generation_tokens_sum") == generated


async def test_eng_083_a_request_that_leaves_in_mid_prefill_counts_what_was_computed() -> None:
    cost = CostModel(prefill_tokens_per_second=1000)
    setup = Setup(scheduling=SchedulingConfig(max_batch_tokens=32), cost=cost, max_model_tokens=1024)
    async with run_engine(setup) as engine:
        body = {"prompt": "x" * 1000, "max_tokens": 2}
        task = asyncio.create_task(engine.post("/v1/completions", body))
        await engine.wait_for(lambda: engine.context.thread.snapshot.counts.num_running == 1)
        await asyncio.sleep(0.15)
        task.cancel()
        await engine.settle()
        samples = await scrape(engine)
        computed = total(samples, "vllm:prompt_tokens_total")
        assert 32 <= computed < 1000
        assert computed % 32 == 0
        assert total(samples, "vllm:iteration_tokens_total_sum") == computed
        assert total(samples, "millpond_engine_prompt_tokens_total", source="computed") == computed
        assert total(samples, "vllm:prefix_cache_queries_total") == 1000
        assert total(samples, "vllm:time_to_first_token_seconds_count") == 0


async def test_refused_requests_are_counted_by_code_and_in_no_histogram() -> None:
    async with run_engine() as engine:
        await engine.post("/v1/completions", {"prompt": "x", "n": 0})
        await engine.post("/v1/completions", {"prompt": "x" * 2000})
        await engine.post(
            "/v1/completions", {"prompt": "x", "max_tokens": 1000, "min_tokens": 1, "n": 1, "seed": 1}
        )
        await engine.settle()
        samples = await scrape(engine)
        assert total(samples, "millpond_engine_refusals_total", reason="invalid_value") == 1
        assert total(samples, "millpond_engine_refusals_total", reason="context_length_exceeded") == 1
        assert total(samples, "millpond_engine_requests_total", outcome="refused") == 2
        assert total(samples, "vllm:e2e_request_latency_seconds_count") == 1


async def test_eng_084_hit_counters_agree_with_the_responses() -> None:
    async with run_engine() as engine:
        cached = 0
        for _ in range(11):
            answer = await engine.complete(prompt="shared " * 20, max_tokens=2)
            cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        samples = await scrape(engine)
        assert cached == 10 * 128
        assert total(samples, "vllm:prefix_cache_hits_total") == cached
        assert total(samples, "vllm:prompt_tokens_cached_total") == cached
        assert total(samples, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") == cached
        assert total(samples, "millpond_engine_prefix_cache_hit_tokens_total", tier="device") == cached
        assert total(samples, "millpond_engine_prompt_tokens_total", source="cached_device") == cached
        assert total(samples, "vllm:prompt_tokens_total") == 11 * 140


async def test_eng_085_an_idle_engine_with_a_warm_cache_uses_nothing() -> None:
    async with run_engine() as engine:
        await engine.complete(prompt="warm " * 30)
        await engine.settle()
        samples = await scrape(engine)
        assert total(samples, "vllm:kv_cache_usage_perc") == 0
        assert total(samples, "millpond_engine_kv_num_blocks", tier="device", state="cached") > 0
        assert total(samples, "millpond_engine_kv_num_blocks", tier="device") == 256
        assert total(samples, "millpond_engine_num_leaked_blocks") == 0


async def test_classes_and_tenants_are_labels_and_strangers_fold_into_other() -> None:
    scheduling = SchedulingConfig(
        classes=(ClassConfig(name="interactive", ttft_milliseconds=1), ClassConfig(name="batch")),
        tenants=(TenantConfig(name="acme"),),
    )
    setup = Setup(scheduling=scheduling, cost=CostModel(decode_step_seconds=0.01))
    async with run_engine(setup) as engine:
        for tenant, class_name in (("acme", "batch"), ("nobody", "interactive"), ("", "weird")):
            given = {headers.TENANT: tenant, headers.CLASS: class_name}
            await engine.post("/v1/completions", {"prompt": "x", "max_tokens": 3}, **given)
        samples = await scrape(engine)
        name = "millpond_engine_generation_tokens_total"
        assert total(samples, name, tenant="acme", **{"class": "batch"}) == 3
        assert total(samples, name, tenant="other", **{"class": "interactive"}) == 6
        misses = total(samples, "millpond_engine_deadline_misses_total", target="ttft")
        assert misses == 2
        assert total(samples, "millpond_engine_queue_seconds_count") == 3


async def test_device_time_sums_to_wall_time() -> None:
    async with run_engine(Setup(cost=CostModel(decode_step_seconds=0.005))) as engine:
        ready = engine.context.thread.snapshot.ready_at
        assert ready is not None
        await asyncio.gather(*[engine.complete(prompt=f"{i}" * 40, max_tokens=20) for i in range(4)])
        await engine.settle()
        before = time.monotonic()
        samples = await scrape(engine)
        after = time.monotonic()
        seconds = total(samples, "millpond_engine_gpu_seconds_total")
        assert before - ready - 0.001 <= seconds <= after - ready + 0.001
        assert total(samples, "millpond_engine_gpu_seconds_total", phase="decode") > 0.05
        assert total(samples, "millpond_engine_gpu_seconds_total", phase="prefill") > 0
        assert total(samples, "millpond_engine_step_seconds_count", part="wait") > 0


async def test_waiting_requests_have_a_reason_and_an_age() -> None:
    setup = Setup(
        scheduling=SchedulingConfig(max_sequences=1),
        cost=CostModel(decode_step_seconds=0.01),
        output_tokens=300,
    )
    async with run_engine(setup) as engine:
        tasks = [asyncio.create_task(engine.complete(prompt="x", max_tokens=60)) for _ in range(3)]
        await engine.wait_for(lambda: engine.context.thread.snapshot.counts.num_waiting == 2)
        await asyncio.sleep(0.05)
        samples = await scrape(engine)
        assert total(samples, "vllm:num_requests_running") == 1
        assert total(samples, "vllm:num_requests_waiting") == 2
        assert total(samples, "vllm:num_requests_waiting_by_reason") == 2
        assert total(samples, "millpond_engine_num_requests_waiting") == 2
        assert total(samples, "millpond_engine_oldest_waiting_seconds", **{"class": "interactive"}) > 0.04
        await asyncio.gather(*tasks)


async def test_preemptions_are_counted() -> None:
    setup = Setup(num_blocks=12, max_model_tokens=160, output_tokens=140)
    async with run_engine(setup) as engine:
        await asyncio.gather(*[engine.complete(prompt=f"{i}" * 20, max_tokens=120) for i in range(4)])
        await engine.settle()
        samples = await scrape(engine)
        count = total(samples, "vllm:num_preemptions_total")
        assert count > 0
        assert total(samples, "millpond_engine_preemptions_total") == count
        assert total(samples, "vllm:request_num_preemptions_sum") == count
        assert total(samples, "vllm:time_to_first_token_seconds_count") == 4


async def test_evictions_belong_to_the_tenant_who_computed_the_block() -> None:
    scheduling = SchedulingConfig(tenants=(TenantConfig(name="acme"), TenantConfig(name="zeta")))
    async with run_engine(Setup(num_blocks=14, max_model_tokens=200, scheduling=scheduling)) as engine:
        for tenant in ("acme", "zeta", "zeta"):
            body = {"prompt": tenant * 40, "max_tokens": 2}
            assert (await engine.post("/v1/completions", body, **{headers.TENANT: tenant}))[0] == 200
        await engine.complete(prompt="n" * 160, max_tokens=2)
        samples = await scrape(engine)
        assert total(samples, "millpond_engine_evicted_blocks_total", tenant="acme", reason="Capacity") == 10
        await engine.settle()
        cached = (await engine.state())["device"]["cached"]
        await engine.call_admin("POST", "/reset_prefix_cache")
        samples = await scrape(engine)
        assert total(samples, "millpond_engine_evicted_blocks_total", reason="Reset") == cached


async def test_a_scrape_with_200_tenants_is_quick() -> None:
    tenants = tuple(TenantConfig(name=f"tenant-{i}") for i in range(200))
    async with run_engine(Setup(scheduling=SchedulingConfig(tenants=tenants))) as engine:
        await scrape(engine)
        times = []
        for _ in range(3):
            started = time.process_time()
            await engine.get("/metrics")
            times.append(time.process_time() - started)
        assert min(times) < 0.1


async def test_a_deadline_from_the_gateway_that_has_passed_is_a_miss() -> None:
    async with run_engine() as engine:
        body = {"prompt": "x", "max_tokens": 2}
        await engine.post("/v1/completions", body, **{headers.DEADLINE: "-1000"})
        await engine.post("/v1/completions", body, **{headers.DEADLINE: "60000"})
        samples = await scrape(engine)
        assert total(samples, "millpond_engine_deadline_misses_total", target="ttft") == 1


async def test_blocks_are_reported_by_the_tenant_who_computed_them() -> None:
    scheduling = SchedulingConfig(tenants=(TenantConfig(name="acme"), TenantConfig(name="zeta")))
    setup = Setup(scheduling=scheduling, cost=CostModel(decode_step_seconds=0.02), output_tokens=300)
    async with run_engine(setup) as engine:
        name = "millpond_engine_kv_tenant_num_blocks"
        samples = await scrape(engine)
        assert {dict(labels)["tenant"] for (n, labels) in samples if n == name} == {"acme", "zeta", "other"}
        assert total(samples, name) == 0
        body = {"prompt": "a" * 160, "max_tokens": 4}
        assert (await engine.post("/v1/completions", body, **{headers.TENANT: "acme"}))[0] == 200
        running = {"prompt": "z" * 80, "max_tokens": 100}
        task = asyncio.create_task(engine.post("/v1/completions", running, **{headers.TENANT: "stranger"}))
        await engine.wait_for(lambda: engine.context.thread.snapshot.counts.num_running == 1)
        await asyncio.sleep(0.2)
        samples = await scrape(engine)
        assert total(samples, name, tenant="acme", tier="device", state="cached") == 10
        assert total(samples, name, tenant="acme", state="in_use") == 0
        assert total(samples, name, tenant="other", tier="device", state="in_use") >= 6
        assert total(samples, name, tenant="zeta") == 0
        for state in ("cached", "in_use"):
            everything = total(samples, "millpond_engine_kv_num_blocks", tier="device", state=state)
            assert total(samples, name, tier="device", state=state) == everything
        await task


async def test_block_seconds_are_blocks_times_the_time_they_were_held() -> None:
    scheduling = SchedulingConfig(
        classes=(ClassConfig(name="interactive"), ClassConfig(name="batch")),
        tenants=(TenantConfig(name="acme"),),
    )
    setup = Setup(scheduling=scheduling, cost=CostModel(decode_step_seconds=0.02))
    async with run_engine(setup) as engine:
        name = "millpond_engine_kv_block_seconds_total"
        assert total(await scrape(engine), name) == 0
        started = time.monotonic()
        given = {headers.TENANT: "acme", headers.CLASS: "batch"}
        body = {"prompt": "x" * 150, "max_tokens": 40}  # 10 blocks at first, 12 at the end
        assert (await engine.post("/v1/completions", body, **given))[0] == 200
        seconds = time.monotonic() - started
        await engine.settle()
        samples = await scrape(engine)
        held = total(samples, name, tenant="acme", **{"class": "batch"})
        assert 10 * (seconds - 0.2) <= held <= 12 * seconds
        assert total(samples, name) == held
        await asyncio.sleep(0.3)
        assert total(await scrape(engine), name) == held, "cached blocks are nobody's cost"


async def test_cost_is_device_time_times_the_price() -> None:
    config = EngineConfig(
        model_name="fake",
        model_path="fake",
        max_model_tokens=512,
        scheduling=SchedulingConfig(tenants=(TenantConfig(name="acme"),)),
        price=PriceConfig(per_device_hour=3.6, currency="EUR"),
    )
    async with run_engine(Setup(config=config, cost=CostModel(decode_step_seconds=0.01))) as engine:
        assert total(await scrape(engine), "millpond_engine_cost_total", currency="EUR", tenant="acme") == 0
        given = {headers.TENANT: "acme"}
        assert (await engine.post("/v1/completions", {"prompt": "x", "max_tokens": 20}, **given))[0] == 200
        await engine.settle()
        samples = await scrape(engine)
        for tenant in ("acme", "other", ""):
            seconds = total(samples, "millpond_engine_gpu_seconds_total", tenant=tenant)
            cost = total(samples, "millpond_engine_cost_total", tenant=tenant, currency="EUR")
            assert abs(cost - seconds / 1000) < 1e-9
        assert total(samples, "millpond_engine_cost_total", tenant="acme") > 0.1 / 1000


@pytest.mark.parametrize(
    ("scheduling", "reason"),
    [
        (SchedulingConfig(max_sequences=1, max_queued_requests=1), "max_num_queued_reqs"),
        (SchedulingConfig(max_sequences=1, max_queued_tokens=50), "max_num_queued_tokens"),
    ],
)
async def test_a_full_queue_is_counted_by_the_bound_that_was_met(
    scheduling: SchedulingConfig, reason: str
) -> None:
    setup = Setup(scheduling=scheduling, cost=CostModel(decode_step_seconds=0.02), output_tokens=200)
    async with run_engine(setup) as engine:
        thread = engine.context.thread
        tasks = [asyncio.create_task(engine.complete(prompt="a" * 40, max_tokens=60))]
        await engine.wait_for(lambda: thread.snapshot.counts.num_running == 1)
        tasks.append(asyncio.create_task(engine.complete(prompt="b" * 40, max_tokens=2)))
        await engine.wait_for(lambda: thread.snapshot.counts.num_waiting == 1)
        status, answer = await engine.post("/v1/completions", {"prompt": "c" * 40, "max_tokens": 2})
        assert (status, answer["error"]["code"]) == (503, "overloaded")
        await asyncio.gather(*tasks)
        await engine.settle()
        samples = await scrape(engine)
        assert total(samples, "vllm:admission_rejections_total", reason=reason) == 1
        assert total(samples, "vllm:admission_rejections_total") == 1
