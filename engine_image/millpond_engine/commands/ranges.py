"""What numbers may be: one table for the configuration file and its flags, and argument types for the other flags."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from millpond_common.contract.engine_config import ClassConfig, ConfigError, EngineConfig, TenantConfig

MAX_TOKENS = 1 << 24
MAX_BYTES = 1 << 50
_WEEK_SECONDS = 7 * 24 * 3600


@dataclass(frozen=True, slots=True)
class Bounded:
    """One value with what it may be; an absent one is always fine."""

    name: str
    value: float | None
    least: float
    most: float


def check_ranges(config: EngineConfig) -> None:
    """Compare every number with its range, and every name with what a name needs.

    Raises:
        ConfigError: naming the first key that is wrong.
    """
    for item in (*_main(config), *_lists(config)):
        if item.value is not None and not item.least <= item.value <= item.most:
            raise ConfigError(
                f"engine configuration: {item.name} is {item.value:g}; it must be {item.least:g} to {item.most:.0f}"
            )
    names = {"modelName": config.model_name, "modelPath": config.model_path}
    scheduling = config.scheduling
    names |= {"scheduling.defaultClass": scheduling.default_class}
    names |= {f"scheduling.classes[{index}].name": item.name for index, item in enumerate(scheduling.classes)}
    names |= {f"scheduling.tenants[{index}].name": item.name for index, item in enumerate(scheduling.tenants)}
    for index, adapter in enumerate(config.adapters):
        names |= {f"adapters[{index}].name": adapter.name, f"adapters[{index}].path": adapter.path}
    for name, value in names.items():
        if not value.strip():
            raise ConfigError(f"engine configuration: {name} is empty")
    _check_gates(scheduling.classes)


def _main(config: EngineConfig) -> Iterator[Bounded]:
    cache, scheduling = config.kv_cache, config.scheduling
    yield Bounded("maxModelTokens", config.max_model_tokens, 1, MAX_TOKENS)
    yield Bounded("defaultOutputTokens", config.default_output_tokens, 1, MAX_TOKENS)
    yield Bounded("tensorParallelSize", config.tensor_parallel_size, 1, 64)
    yield Bounded("drainSeconds", config.drain_seconds, 0, _WEEK_SECONDS)
    yield Bounded("blockKeySeed", config.block_key_seed, 0, (1 << 64) - 1)
    yield Bounded("kvCache.blockTokens", cache.block_tokens, 1, 1024)
    yield Bounded("kvCache.devicePercent", cache.device_percent, 1, 100)
    yield Bounded("kvCache.deviceBytes", cache.device_bytes, 1, MAX_BYTES)
    yield Bounded("kvCache.hostBytes", cache.host_bytes, 0, MAX_BYTES)
    yield Bounded("scheduling.maxBatchTokens", scheduling.max_batch_tokens, 1, MAX_TOKENS)
    yield Bounded("scheduling.maxSequences", scheduling.max_sequences, 1, 65_536)
    yield Bounded("scheduling.maxQueuedRequests", scheduling.max_queued_requests, 1, 1_000_000)
    yield Bounded("scheduling.maxQueuedTokens", scheduling.max_queued_tokens, 1, 1 << 40)


def _lists(config: EngineConfig) -> Iterator[Bounded]:
    for index, item in enumerate(config.scheduling.classes):
        yield from _class(f"scheduling.classes[{index}].", item)
    for index, tenant in enumerate(config.scheduling.tenants):
        yield from _tenant(f"scheduling.tenants[{index}].", tenant)
    reserved = sum(item.reserved_kv_percent for item in config.scheduling.classes)
    yield Bounded("the sum of reservedKvPercent in scheduling.classes", reserved, 0, 100)


def _class(at: str, item: ClassConfig) -> Iterator[Bounded]:
    yield Bounded(at + "priority", item.priority, -1_000_000, 1_000_000)
    yield Bounded(at + "ttftMilliseconds", item.ttft_milliseconds, 1, 1000 * _WEEK_SECONDS)
    yield Bounded(at + "itlMilliseconds", item.itl_milliseconds, 1, 1000 * _WEEK_SECONDS)
    yield Bounded(at + "reservedKvPercent", item.reserved_kv_percent, 0, 100)
    yield Bounded(at + "maxSharePercent", item.max_share_percent, 1, 100)
    yield Bounded(at + "admitWhileQueuedBelow", item.admit_while_queued_below, 0, 1_000_000)


def _tenant(at: str, item: TenantConfig) -> Iterator[Bounded]:
    yield Bounded(at + "weight", item.weight, 1, 1_000_000)
    yield Bounded(at + "maxConcurrency", item.max_concurrency, 1, 1_000_000)
    yield Bounded(at + "maxCachePercent", item.max_cache_percent, 0, 100)


def _check_gates(classes: Iterable[ClassConfig]) -> None:
    known = {item.name for item in classes}
    for index, item in enumerate(classes):
        gate = item.admit_while_queued_class
        if gate is not None and gate not in known:
            raise ConfigError(
                f"engine configuration: scheduling.classes[{index}].admitWhileQueuedClass names {gate}, which is no class"
            )


def whole(least: int, most: int) -> Callable[[str], int]:
    """An argument type: a whole number in a range."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is not in {least} to {most}")
        return value

    return parse


def number(least: float, most: float) -> Callable[[str], float]:
    """An argument type: a number in a range; not infinite, not NaN."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not (math.isfinite(value) and least <= value <= most):
            raise argparse.ArgumentTypeError(f"{text} is not in {least:g} to {most:g}")
        return value

    return parse


PORT = whole(0, 65_535)
COUNT = whole(0, 100_000_000)
SECONDS = number(0.0, _WEEK_SECONDS)
