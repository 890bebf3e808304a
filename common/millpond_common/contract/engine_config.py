"""The engine's configuration file: the operator renders it into a ConfigMap, the engine reads it.

YAML on disk, these structs in memory. Unknown keys are refused by the engine with their path, so
that a misspelt setting never passes silently.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class ClassConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """One traffic class. Absent targets mean no target."""

    name: str
    priority: int = 0
    ttft_milliseconds: int | None = None
    itl_milliseconds: int | None = None
    reserved_kv_percent: int = 0
    max_share_percent: int = 100
    admit_while_queued_class: str | None = None
    admit_while_queued_below: int | None = None


class TenantConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """One tenant's share inside a class."""

    name: str
    weight: int = 1
    max_concurrency: int | None = None
    max_cache_percent: int = 100


class SchedulingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What the scheduler may spend and in which order."""

    max_batch_tokens: int = 2048
    max_sequences: int = 256
    max_queued_requests: int = 1024
    max_queued_tokens: int = 4_000_000
    policy: Literal["FairShare", "Fifo", "Priority", "Deadline"] = "FairShare"
    preemption: Literal["Auto", "Swap", "Recompute", "Reject"] = "Auto"
    classes: tuple[ClassConfig, ...] = ()
    default_class: str = "interactive"
    tenants: tuple[TenantConfig, ...] = ()


class KvCacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Memory of the KV cache."""

    block_tokens: int = 16
    device_percent: int = 90
    """Of a GPU's free memory after weights; on the CPU `device_bytes` counts instead."""
    device_bytes: int | None = None
    host_bytes: int = 0
    """Host tier for swapped sequences and, later, offloaded prefixes."""


class PriceConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What a device costs, for the metric `cost_total`."""

    per_device_hour: float | None = None
    """Absent: no cost is reported."""
    currency: str = "USD"


class AdapterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """One LoRA adapter served beside the base model."""

    name: str
    path: str


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The whole file. Every key has a flag of the same name on `millpond-engine serve`."""

    model_name: str
    """What clients put in `model`."""
    model_path: str
    """File (GGUF) or directory (safetensors) inside the container."""
    device: Literal["Auto", "Cpu", "Cuda"] = "Auto"
    dtype: Literal["Auto", "BFloat16", "Float16", "Float32"] = "Auto"
    max_model_tokens: int = 8192
    """Longest prompt plus output; lowered to what the model supports."""
    default_output_tokens: int | None = None
    """Output limit of a chat request that names none; absent: what is left of the context."""
    tensor_parallel_size: int = 1
    role: Literal["Both", "Prefill", "Decode"] = "Both"
    kv_cache: KvCacheConfig = KvCacheConfig()
    scheduling: SchedulingConfig = SchedulingConfig()
    adapters: tuple[AdapterConfig, ...] = ()
    drain_seconds: int = 300
    price: PriceConfig = PriceConfig()
    block_key_seed: int = 0
    """Seed of the routing key; equal for gateway and engines of a pool."""


class ConfigError(ValueError):
    """The configuration file cannot be used; the message names the path and what is allowed."""


def parse_engine_config(data: object) -> EngineConfig:
    """Validate parsed YAML.

    Raises:
        ConfigError: with the path of the offending key.
    """
    try:
        return msgspec.convert(data, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"engine configuration: {error}") from error


def dump_engine_config(config: EngineConfig) -> dict[str, object]:
    """Plain data for YAML, defaults included so that the file explains itself."""
    built = msgspec.to_builtins(config)
    assert isinstance(built, dict)
    return built
