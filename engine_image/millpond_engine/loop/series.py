"""Series of closed label sets, which exist at 0 from the start so that a rate sees the first increment."""

from __future__ import annotations

from collections.abc import Sequence

from millpond_common.contract import metrics as m
from millpond_common.contract.openai import ErrorCode
from millpond_engine.loop.stats import StatCells

REFUSAL_CODES = tuple(
    code.value
    for code in (
        ErrorCode.INVALID_VALUE,
        ErrorCode.UNSUPPORTED_FIELD,
        ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        ErrorCode.KV_CAPACITY_EXCEEDED,
        ErrorCode.MODEL_NOT_FOUND,
        ErrorCode.PAYLOAD_TOO_LARGE,
        ErrorCode.TENANT_CONCURRENCY,
        ErrorCode.OVERLOADED,
        ErrorCode.DRAINING,
        ErrorCode.ASLEEP,
        ErrorCode.NOT_IMPLEMENTED,
        ErrorCode.ENGINE_ERROR,
    )
)
"""Codes the engine refuses with."""


def start_cells(
    cells_own: StatCells,
    cells_vllm: StatCells,
    *,
    classes: Sequence[str],
    tenants: Sequence[str],
    currency: str | None,
) -> None:
    """Make every combination of known label values exist; `currency` is absent without a price."""
    who = (classes, tenants)
    own, vllm = cells_own.counters, cells_vllm.counters
    for name in ("prefix_cache_query_tokens_total", "generation_tokens_total", "kv_block_seconds_total"):
        own[name].start(*who)
    if currency is not None:
        own["cost_total"].start(*who, (currency,))
    own["prefix_cache_hit_tokens_total"].start(*who, m.TIERS)
    own["evicted_blocks_total"].start(tenants, m.TIERS, m.EVICTION_REASONS)
    own["preemptions_total"].start(*who, m.PREEMPTION_MODES, m.PREEMPTION_REASONS)
    own["recomputed_tokens_total"].start(*who, ("Preempted",))
    for name in ("swapped_blocks_total", "swapped_bytes_total"):
        own[name].start(("out", "in"), ("host",))
    own["requests_total"].start(*who, m.OUTCOMES)
    own["refusals_total"].start(*who, REFUSAL_CODES)
    own["deadline_misses_total"].start(*who, ("ttft", "itl"))
    own["prompt_tokens_total"].start(*who, m.PROMPT_SOURCES)
    own["gpu_seconds_total"].start(*who, m.GPU_PHASES)
    for name in (
        "time_to_first_token_seconds",
        "e2e_seconds",
        "queue_seconds",
        "inter_token_latency_seconds",
    ):
        cells_own.histograms[name].start(classes)
    cells_own.histograms["step_seconds"].start(m.STEP_PARTS)
    cells_own.histograms["step_tokens"].start(m.GPU_PHASES)
    vllm["prompt_tokens_by_source_total"].start(m.VLLM_SOURCES)
    vllm["request_success_total"].start(m.VLLM_FINISH_REASONS)
    vllm["admission_rejections_total"].start(m.VLLM_ADMISSION_REASONS)
    for counter in vllm.values():
        if not counter.family.labels:
            counter.start()
    for histogram in cells_vllm.histograms.values():
        histogram.start()
