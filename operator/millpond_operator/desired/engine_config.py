"""The engine's configuration file, from a pool's spec."""

from __future__ import annotations

from millpond_common.contract.engine_config import (
    AdapterConfig,
    ClassConfig,
    EngineConfig,
    KvCacheConfig,
    SchedulingConfig,
    TenantConfig,
)
from millpond_operator.api.pool import InferencePool, RoleView
from millpond_operator.api.quantity import parse_bytes
from millpond_operator.api.spec import ClassSpec, KVCacheSpec, ResourcesSpec, SchedulingSpec
from millpond_operator.desired.model import place_adapters, place_model

GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")


def make_engine_config(pool: InferencePool, role: RoleView) -> EngineConfig:
    """Everything the engine of one role needs to know."""
    engine = pool.spec.engine
    adapters = place_adapters(pool)
    return EngineConfig(
        model_name=pool.model_name,
        model_path=place_model(pool).path,
        device="Cuda" if has_gpu(role.resources) else "Cpu",
        dtype=engine.dtype,
        max_model_tokens=engine.max_model_tokens,
        default_output_tokens=engine.default_output_tokens,
        tensor_parallel_size=engine.tensor_parallel_size,
        role=role.role,
        kv_cache=_make_kv_cache(engine.kv_cache),
        scheduling=_make_scheduling(pool.spec.scheduling),
        adapters=tuple(AdapterConfig(name=name, path=place.path) for name, place in adapters.items()),
        drain_seconds=pool.spec.rollout.drain_seconds,
    )


def has_gpu(resources: ResourcesSpec) -> bool:
    """Whether a replica gets a GPU, counted or by resource claim."""
    return bool(resources.claims) or any(name in resources.limits for name in GPU_RESOURCES)


def _make_kv_cache(cache: KVCacheSpec) -> KvCacheConfig:
    return KvCacheConfig(
        block_tokens=cache.block_tokens,
        device_percent=cache.device_percent,
        device_bytes=parse_bytes(cache.device_memory) if cache.device_memory is not None else None,
        host_bytes=parse_bytes(cache.host_memory) if cache.host_memory is not None else 0,
    )


def _make_scheduling(scheduling: SchedulingSpec) -> SchedulingConfig:
    return SchedulingConfig(
        max_batch_tokens=scheduling.max_batch_tokens,
        max_sequences=scheduling.max_sequences,
        max_queued_requests=scheduling.max_queued_requests,
        max_queued_tokens=scheduling.max_queued_tokens,
        policy=scheduling.policy,
        preemption=scheduling.preemption,
        classes=tuple(_make_class(entry) for entry in scheduling.classes),
        default_class=scheduling.default_class,
        tenants=tuple(
            TenantConfig(
                name=tenant.name,
                weight=tenant.weight,
                max_concurrency=tenant.max_concurrency,
                max_cache_percent=tenant.max_cache_percent,
            )
            for tenant in scheduling.tenants
        ),
    )


def _make_class(entry: ClassSpec) -> ClassConfig:
    condition = entry.admit_while_queued
    return ClassConfig(
        name=entry.name,
        priority=entry.priority,
        ttft_milliseconds=entry.ttft_milliseconds,
        itl_milliseconds=entry.itl_milliseconds,
        reserved_kv_percent=entry.reserved_kv_percent,
        max_share_percent=entry.max_share_percent,
        admit_while_queued_class=condition.class_name if condition is not None else None,
        admit_while_queued_below=condition.below if condition is not None else None,
    )
