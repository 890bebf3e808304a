"""Values of the gauge families, read from the newest snapshot. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from millpond_common.contract import metrics as m
from millpond_common.contract.metrics import Family
from millpond_engine.loop.recorder import Recorder
from millpond_engine.loop.snapshot import LoopPhase, LoopSnapshot
from millpond_engine.loop.stats import Labels
from millpond_engine.records.outputs import SchedulerCounts
from millpond_engine.server.context import ServerContext
from millpond_engine.server.intake import get_now

Samples = dict[str, dict[Labels, float]]
_CAPACITY_REASONS = {"Capacity", "Preempted"}
"""What vLLM calls waiting for capacity; everything else is deferred."""


def read_vllm_gauges(snapshot: LoopSnapshot) -> Samples:
    """Samples of vLLM's gauges by short name."""
    counts = snapshot.counts
    total = counts.free_blocks + counts.cached_blocks + counts.used_blocks
    deferred = sum(
        number
        for queue in counts.queues
        for reason, number in queue.waiting.items()
        if reason not in _CAPACITY_REASONS
    )
    asleep = snapshot.phase is LoopPhase.ASLEEP
    return {
        "num_requests_running": {(): counts.num_running},
        "num_requests_waiting": {(): counts.num_waiting},
        "num_requests_waiting_by_reason": {
            ("capacity",): max(0, counts.num_waiting - deferred),
            ("deferred",): min(deferred, counts.num_waiting),
        },
        "kv_cache_usage_perc": {(): counts.used_blocks / total if total else 0.0},
        "engine_sleep_state": {
            ("awake",): float(not asleep),
            ("weights_offloaded",): 0.0,
            ("discard_all",): float(asleep),
        },
    }


def read_own_gauges(snapshot: LoopSnapshot, recorder: Recorder) -> Samples:
    """Samples of Millpond's gauges by short name."""
    counts = snapshot.counts
    running: dict[Labels, float] = {(c, t): 0.0 for c in recorder.classes for t in recorder.tenants}
    waiting: dict[Labels, float] = {(*who, reason): 0.0 for who in running for reason in m.WAIT_REASONS}
    oldest: dict[Labels, float] = {(c,): 0.0 for c in recorder.classes}
    now = get_now()
    for queue in counts.queues:
        who = recorder.label_class(queue.class_name), recorder.label_tenant(queue.tenant)
        running[who] += queue.running
        for reason, number in queue.waiting.items():
            waiting[*who, reason] = waiting.get((*who, reason), 0.0) + number
        if queue.oldest_waiting_since is not None:
            oldest[who[0],] = max(oldest[who[0],], now - queue.oldest_waiting_since)
    return {
        "num_requests_running": running,
        "num_requests_waiting": waiting,
        "oldest_waiting_seconds": oldest,
        "kv_num_blocks": _read_blocks(counts),
        "kv_tenant_num_blocks": _read_tenant_blocks(counts, recorder),
        "num_leaked_blocks": {(): counts.leaked_blocks},
    }


def _read_blocks(counts: SchedulerCounts) -> dict[Labels, float]:
    return {
        ("device", "free"): counts.free_blocks,
        ("device", "cached"): counts.cached_blocks,
        ("device", "in_use"): counts.used_blocks,
        ("host", "free"): counts.free_host_blocks,
        ("host", "cached"): 0,
        ("host", "in_use"): counts.used_host_blocks,
    }


def _read_tenant_blocks(counts: SchedulerCounts, recorder: Recorder) -> dict[Labels, float]:
    """Blocks by tenant: `in_use` and `cached` on the device, `in_use` on the host; the latter caches nothing."""
    blocks: dict[Labels, float] = {
        (tenant, tier, state): 0.0
        for tenant in recorder.tenants
        for tier in m.TIERS
        for state in ("cached", "in_use")
    }
    for owner in counts.owners:
        tenant = recorder.label_tenant(owner.tenant)
        blocks[tenant, "device", "in_use"] += owner.used_blocks
        blocks[tenant, "device", "cached"] += owner.cached_blocks
        blocks[tenant, "host", "in_use"] += owner.host_blocks
    return blocks


def compute_idle_seconds(context: ServerContext, snapshot: LoopSnapshot) -> float:
    """Device seconds since ready that no request was charged for."""
    if snapshot.ready_at is None:
        return 0.0
    wall = (get_now() - snapshot.ready_at) * context.config.tensor_parallel_size
    return max(0.0, wall - snapshot.charged_seconds)


def list_infos(
    context: ServerContext, snapshot: LoopSnapshot
) -> Iterator[tuple[Family, dict[str, str], float]]:
    """Facts as labels of gauges whose value is 1 (adapters: unix time)."""
    info = snapshot.info
    cache = {
        "block_size": str(info.block_tokens if info else context.config.kv_cache.block_tokens),
        "num_gpu_blocks": str(info.num_blocks if info else 0),
        "cache_dtype": info.dtype if info else "auto",
        "enable_prefix_caching": "True",
        "engine": "0",
    }
    yield Family("vllm:cache_config_info", "gauge", "Facts of the KV cache."), cache, 1.0
    if context.config.adapters:
        names = ",".join(adapter.name for adapter in context.config.adapters)
        lora = {
            "max_lora": str(len(context.config.adapters)),
            "running_lora_adapters": names if snapshot.counts.num_running else "",
            "waiting_lora_adapters": names if snapshot.counts.num_waiting else "",
        }
        yield Family("vllm:lora_requests_info", "gauge", "Adapters in use."), lora, float(context.created)
    facts = {
        "model": context.config.model_name,
        "version": context.version,
        "role": context.config.role,
        "epoch": context.epoch,
    }
    yield Family("millpond_engine_info", "gauge", "Facts of this start."), facts, 1.0
