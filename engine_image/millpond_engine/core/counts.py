"""The snapshot for metrics: counters and one pass over requests, none over blocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

from millpond_engine.core.sequence import Account
from millpond_engine.core.state import State
from millpond_engine.records.outputs import OwnerCount, QueueCount, SchedulerCounts


def make_counts(state: State) -> SchedulerCounts:
    """Count what there is now."""
    pool, host_blocks = state.cache.pool, Counter[int]()
    for group in state.queue:
        host_blocks[group.account.owner] += len(group.host_blocks)
    running = {sequence.group: None for sequence in state.running}
    unfinished = sum(max(0, s.prompt_tokens - s.computed) for s in state.running)
    return SchedulerCounts(
        free_blocks=pool.num_free,
        cached_blocks=pool.num_cached,
        used_blocks=pool.num_used,
        free_host_blocks=state.host.num_blocks - host_blocks.total(),
        used_host_blocks=host_blocks.total(),
        num_running=len(running),
        num_waiting=sum(1 for group in state.queue if not group.running),
        running_tokens=sum(len(sequence.tokens) for sequence in state.running),
        waiting_tokens=state.queue.num_tokens + unfinished,
        queues=_count_queues(state),
        owners=tuple(
            OwnerCount(name, tenant, pool.used_by[n], pool.cached_by[n], host_blocks[n])
            for (name, tenant), n in state.owners.items()
            if pool.used_by[n] or pool.cached_by[n] or host_blocks[n]
        ),
        cached_value_tokens=pool.cached_weight * state.capacity.block_tokens,
        leaked_blocks=0 if state.groups or state.flights else pool.num_used,
        evicted_blocks=state.cache.num_evicted,
        **asdict(state.counters),
    )


def _count_queues(state: State) -> tuple[QueueCount, ...]:
    reasons = {account: Counter[str]() for account in state.accounts.values() if account.num_running}
    oldest: dict[Account, float] = {}
    for group in state.queue:
        if not group.running:
            reasons.setdefault(group.account, Counter())[group.wait_reason.value] += 1
            oldest[group.account] = min(group.waiting_since, oldest.get(group.account, group.waiting_since))
    return tuple(
        QueueCount(
            account.class_name, account.tenant, account.num_running, dict(waiting), oldest.get(account)
        )
        for account, waiting in sorted(reasons.items(), key=lambda item: (item[0].class_name, item[0].tenant))
    )
