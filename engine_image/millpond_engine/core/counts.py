"""The snapshot for metrics: counters and one pass over requests, none over blocks."""

from __future__ import annotations

from dataclasses import asdict

from millpond_engine.core.state import State
from millpond_engine.records.outputs import QueueCount, SchedulerCounts


def make_counts(state: State) -> SchedulerCounts:
    """Count what there is now."""
    pool, host = state.cache.pool, state.host
    used_host = sum(len(group.host_blocks) for group in state.queue)
    idle = not (state.groups or state.flights)
    counters = asdict(state.counters)
    running = {sequence.group: None for sequence in state.running}
    unfinished = sum(max(0, s.prompt_tokens - s.computed) for s in state.running)
    return SchedulerCounts(
        free_blocks=pool.num_free,
        cached_blocks=pool.num_cached,
        used_blocks=pool.num_used,
        free_host_blocks=host.num_blocks - used_host,
        used_host_blocks=used_host,
        num_running=len(running),
        num_waiting=sum(1 for group in state.queue if not group.running),
        running_tokens=sum(len(sequence.tokens) for sequence in state.running),
        waiting_tokens=state.queue.num_tokens + unfinished,
        queues=_count_queues(state),
        prefix_query_tokens=counters.pop("prefix_query_tokens"),
        prefix_hit_tokens=counters.pop("prefix_hit_tokens"),
        recomputed_tokens=counters.pop("recomputed_tokens"),
        cached_value_tokens=pool.cached_weight * state.capacity.block_tokens,
        leaked_blocks=pool.num_used if idle else 0,
        extra=counters | {"evicted_blocks": state.cache.num_evicted},
    )


def _count_queues(state: State) -> tuple[QueueCount, ...]:
    waiting: dict[tuple[str, str], dict[str, int]] = {}
    oldest: dict[tuple[str, str], float] = {}
    for group in state.queue:
        if group.running:
            continue
        key = (group.rule.name, group.request.tenant)
        reasons = waiting.setdefault(key, {})
        reasons[group.wait_reason.value] = reasons.get(group.wait_reason.value, 0) + 1
        oldest[key] = min(group.waiting_since, oldest.get(key, group.waiting_since))
    running = {key: account.num_running for key, account in state.accounts.items() if account.num_running}
    return tuple(
        QueueCount(
            name,
            tenant,
            running.get((name, tenant), 0),
            waiting.get((name, tenant), {}),
            oldest.get((name, tenant)),
        )
        for name, tenant in sorted({*waiting, *running})
    )
