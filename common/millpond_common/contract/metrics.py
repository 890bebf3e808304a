"""Metric families of the engine: names, kinds, labels and buckets, as dashboards, pickers and autoscalers read them.

Counters carry `_total` in their name here, as on the wire; `vllm:iteration_tokens_total` is a histogram.
Labels listed are those beyond the constant ones: `model_name` and `engine` on vLLM's families, `model`
on Millpond's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, without +Inf."""


TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
VLLM_ITL_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip
ITL_BUCKETS = (
    0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
STEP_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
ITERATION_BUCKETS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
PARAMS_N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTION_BUCKETS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)


def make_token_buckets(max_model_tokens: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 … up to the longest sequence."""
    buckets: list[float] = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale > max_model_tokens:
                return tuple(buckets) or (1.0,)
            buckets.append(float(step * scale))
        scale *= 10


# Values of closed label sets.
OUTCOMES = ("stop", "length", "tool_calls", "cancelled", "error", "refused")
WAIT_REASONS = ("Capacity", "TenantCap", "ClassGate", "KvLoad", "AdapterLoad", "Preempted")
EVICTION_REASONS = ("Capacity", "TenantShare", "Reset")
PREEMPTION_MODES = ("recompute", "swap", "reject")
PREEMPTION_REASONS = ("Capacity", "Class")
PROMPT_SOURCES = ("computed", "cached_device", "cached_lower", "remote")
GPU_PHASES = ("prefill", "decode")
STEP_PARTS = ("plan", "launch", "wait", "update")
TIERS = ("device", "host")
"""Tiers this release fills; disk and store follow with their code."""
OTHER_TENANT = "other"
"""Label of every tenant the pool does not declare."""
VLLM_FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
VLLM_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
VLLM_ADMISSION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")


def _gauge(name: str, text: str, *labels: str) -> Family:
    return Family(name, "gauge", text, labels)


def _counter(name: str, text: str, *labels: str) -> Family:
    return Family(name, "counter", text, labels)


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Family:
    return Family(name, "histogram", text, labels, buckets)


def make_vllm_families(max_model_tokens: int) -> dict[str, Family]:
    """Families under vLLM's names, by name without the prefix `vllm:`."""
    tokens = make_token_buckets(max_model_tokens)
    families = [
        _gauge("num_requests_running", "Requests in the batch."),
        _gauge("num_requests_waiting", "Requests not in the batch, whatever the reason."),
        _gauge("num_requests_waiting_by_reason", "Waiting requests by reason.", "reason"),
        _gauge("kv_cache_usage_perc", "Blocks of live sequences over usable blocks, 0 to 1."),
        _gauge("engine_sleep_state", "1 on the label value that holds.", "sleep_state"),
        _counter("prompt_tokens_total", "Prompt tokens of requests that were scheduled."),
        _counter("prompt_tokens_by_source_total", "Prompt tokens by where their KV came from.", "source"),
        _counter("prompt_tokens_cached_total", "Prompt tokens taken from a cache."),
        _counter("generation_tokens_total", "Tokens generated."),
        _counter("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."),
        _counter("prefix_cache_hits_total", "Prompt tokens found in the prefix cache."),
        _counter("external_prefix_cache_queries_total", "Tokens looked up in a lower tier."),
        _counter("external_prefix_cache_hits_total", "Tokens found in a lower tier."),
        _counter("num_preemptions_total", "Preemptions."),
        _counter("request_success_total", "Finished requests, whatever the outcome.", "finished_reason"),
        _counter("admission_rejections_total", "Requests refused because the queue was full.", "reason"),
        _histogram("time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS),
        _histogram("inter_token_latency_seconds", "Gap between two tokens of a sequence.", VLLM_ITL_BUCKETS),
        _histogram("request_time_per_output_token_seconds", "Mean gap of a request.", VLLM_ITL_BUCKETS),
        _histogram("e2e_request_latency_seconds", "Arrival to last token.", REQUEST_BUCKETS),
        _histogram("request_queue_time_seconds", "Arrival to first scheduled.", REQUEST_BUCKETS),
        _histogram("request_prefill_time_seconds", "First scheduled to first token.", REQUEST_BUCKETS),
        _histogram("request_decode_time_seconds", "First to last token.", REQUEST_BUCKETS),
        _histogram("request_inference_time_seconds", "First scheduled to last token.", REQUEST_BUCKETS),
        _histogram("request_prompt_tokens", "Prompt tokens of a request.", tokens),
        _histogram("request_generation_tokens", "Generated tokens of a request.", tokens),
        _histogram("request_max_num_generation_tokens", "Longest sequence of a request.", tokens),
        _histogram("request_params_max_tokens", "Output limit of a request.", tokens),
        _histogram("request_prefill_kv_computed_tokens", "Prompt tokens computed, not cached.", tokens),
        _histogram("iteration_tokens_total", "Tokens computed in one step.", ITERATION_BUCKETS),
        _histogram("request_params_n", "Sequences a request asked for.", PARAMS_N_BUCKETS),
        _histogram("request_num_preemptions", "Preemptions of a request.", PREEMPTION_BUCKETS),
    ]
    return {f.name: Family(f"vllm:{f.name}", f.kind, f.help, f.labels, f.buckets) for f in families}


def make_engine_families() -> dict[str, Family]:
    """Millpond's families, by name without the prefix `millpond_engine_`."""
    who = ("class", "tenant")
    families = [
        _gauge("num_requests_running", "Requests in the batch.", *who),
        _gauge("num_requests_waiting", "Requests not in the batch.", *who, "reason"),
        _gauge("oldest_waiting_seconds", "Age of the oldest waiting request.", "class"),
        _gauge("kv_num_blocks", "Blocks of a tier; states sum to its size.", "tier", "state"),
        _gauge(
            "kv_tenant_num_blocks",
            "Blocks by who computed them; a shared block counts once.",
            "tenant",
            "tier",
            "state",
        ),
        _gauge("num_leaked_blocks", "Blocks nobody owns; anything but 0 is a defect."),
        _counter("prefix_cache_query_tokens_total", "Prompt tokens looked up.", *who),
        _counter("prefix_cache_hit_tokens_total", "Prompt tokens found.", *who, "tier"),
        _counter(
            "kv_block_seconds_total", "Seconds that requests held blocks of the device, times blocks.", *who
        ),
        _counter("evicted_blocks_total", "Cached blocks dropped.", "tenant", "tier", "reason"),
        _counter("preemptions_total", "Preemptions.", *who, "mode", "reason"),
        _counter("recomputed_tokens_total", "Tokens computed again.", *who, "reason"),
        _counter("swapped_blocks_total", "Blocks moved between tiers.", "direction", "tier"),
        _counter("swapped_bytes_total", "Bytes moved between tiers.", "direction", "tier"),
        _counter("requests_total", "Requests by their one outcome.", *who, "outcome"),
        _counter("refusals_total", "Refused requests by error code.", *who, "reason"),
        _counter("deadline_misses_total", "Requests that missed a target of their class.", *who, "target"),
        _histogram("time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS, "class"),
        _histogram("e2e_seconds", "Arrival to last token.", TTFT_BUCKETS, "class"),
        _histogram("queue_seconds", "Arrival to first scheduled.", TTFT_BUCKETS, "class"),
        _histogram("inter_token_latency_seconds", "Gap between two tokens.", ITL_BUCKETS, "class"),
        _counter("prompt_tokens_total", "Prompt tokens by where their KV came from.", *who, "source"),
        _counter("generation_tokens_total", "Tokens generated.", *who),
        _counter("gpu_seconds_total", "Device time by who used it.", *who, "phase"),
        _counter("cost_total", "Device time times its price.", *who, "currency"),
        _histogram("step_seconds", "Where the time of a step goes.", STEP_BUCKETS, "part"),
        _histogram("step_tokens", "Tokens of a step.", ITERATION_BUCKETS, "phase"),
    ]
    return {
        f.name: Family(f"millpond_engine_{f.name}", f.kind, f.help, f.labels, f.buckets) for f in families
    }
