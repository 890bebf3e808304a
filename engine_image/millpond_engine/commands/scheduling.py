"""The configuration file's scheduling section, as the scheduler takes it."""

from __future__ import annotations

from millpond_common.contract.engine_config import SchedulingConfig
from millpond_engine.records.settings import ClassRule, SchedulerSettings, TenantRule


def make_settings(
    config: SchedulingConfig, *, base_seed: int = 0, cache_events: bool = True
) -> SchedulerSettings:
    """Translate the configuration file's section; `base_seed` should differ between engine starts."""
    classes = tuple(
        ClassRule(
            name=item.name,
            priority=item.priority,
            ttft_seconds=None if item.ttft_milliseconds is None else item.ttft_milliseconds / 1000,
            reserved_percent=item.reserved_kv_percent,
            max_share_percent=item.max_share_percent,
            gate_class=item.admit_while_queued_class,
            gate_below=item.admit_while_queued_below or 0,
        )
        for item in config.classes
    )
    tenants = tuple(
        TenantRule(item.name, item.weight, item.max_concurrency, item.max_cache_percent)
        for item in config.tenants
    )
    return SchedulerSettings(
        max_batch_tokens=config.max_batch_tokens,
        max_sequences=config.max_sequences,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        policy=config.policy,
        preemption=config.preemption,
        classes=classes,
        default_class=config.default_class,
        tenants=tenants,
        base_seed=base_seed,
        cache_events=cache_events,
    )
