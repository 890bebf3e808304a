"""What dashboards, pickers and autoscalers read of the engine changes only on purpose.

The golden file is the list of families as a real Prometheus parser sees them in a scrape of a running engine.
Write it anew with MILLPOND_UPDATE_GOLDEN=1, and say so in the changelog.
"""

from __future__ import annotations

import os
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from tests.support.engine_server import Setup, run_engine

GOLDEN = Path(__file__).parent / "golden" / "engine-metrics.txt"

READERS = {
    "Gateway API Inference Extension": {
        "vllm:num_requests_waiting",
        "vllm:num_requests_running",
        "vllm:kv_cache_usage_perc",
        "vllm:cache_config_info",
    },
    "llm-d variant autoscaler": {
        "vllm:request_success_total",
        "vllm:prefix_cache_hits_total",
        "vllm:prefix_cache_queries_total",
        "vllm:request_prompt_tokens_sum",
        "vllm:request_generation_tokens_count",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:request_time_per_output_token_seconds_sum",
    },
    "AIBrix, production-stack, KServe": {
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:e2e_request_latency_seconds_bucket",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
    },
}


def describe(text: str) -> str:
    """Name, type, labels and bucket bounds of every family, sorted."""
    lines = []
    for family in text_string_to_metric_families(text):
        labels: set[str] = set()
        bounds: list[str] = []
        for sample in family.samples:
            labels |= set(sample.labels) - {"le"}
            bound = sample.labels.get("le")
            if bound is not None and bound not in bounds:
                bounds.append(bound)
        suffix = "_total" if family.type == "counter" else ""
        bucket_text = f" buckets={','.join(bounds)}" if bounds else ""
        lines.append(f"{family.name}{suffix} {family.type} labels={','.join(sorted(labels))}{bucket_text}")
    return "\n".join(sorted(lines)) + "\n"


async def scrape() -> tuple[str, str]:
    async with run_engine(Setup(num_blocks=12, max_model_tokens=160)) as engine:
        await engine.complete(prompt="x" * 40, max_tokens=20)
        await engine.settle()
        async with engine.session.get(engine.url + "/metrics") as response:
            return response.headers["Content-Type"], await response.text()


async def test_the_exposition_is_the_golden_one() -> None:
    kind, text = await scrape()
    assert kind.startswith("text/plain; version=0.0.4")
    described = describe(text)
    if os.environ.get("MILLPOND_UPDATE_GOLDEN") == "1":
        GOLDEN.write_text(described, encoding="utf-8")
    assert described == GOLDEN.read_text(encoding="utf-8")


async def test_every_reader_finds_its_names() -> None:
    _, text = await scrape()
    names = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    for reader, wanted in READERS.items():
        assert wanted <= names, (reader, wanted - names)
    info = next(f for f in text_string_to_metric_families(text) if f.name == "vllm:cache_config_info")
    assert {"block_size", "num_gpu_blocks"} <= set(info.samples[0].labels)
    assert int(info.samples[0].labels["num_gpu_blocks"]) == 12
