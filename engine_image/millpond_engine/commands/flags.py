"""A flag for every key of the engine configuration file, and how file and flags become one configuration."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml

from millpond_common.contract import engine_config
from millpond_common.contract.engine_config import ConfigError, EngineConfig, parse_engine_config
from millpond_engine.commands.ranges import check_ranges

HELP = {
    "modelName": "what clients put in `model`",
    "modelPath": "model file (GGUF) or directory (safetensors)",
    "device": "where the model runs; Auto takes a GPU when there is one",
    "dtype": "type of weights and KV; Auto chooses by device",
    "maxModelTokens": "longest prompt plus output; lowered to what the model supports",
    "defaultOutputTokens": "output limit of a chat request that names none",
    "tensorParallelSize": "processes or GPUs that share one copy of the model",
    "role": "Both; the halves of a prefill/decode split are not served by this release",
    "kvCache.blockTokens": "tokens of one KV block (see `millpond-engine advise`)",
    "kvCache.devicePercent": "share of a GPU's free memory for the KV cache",
    "kvCache.deviceBytes": "bytes of the KV cache on each device; overrides the share",
    "kvCache.hostBytes": "host memory for swapped sequences",
    "scheduling.maxBatchTokens": "tokens computed in one step at most",
    "scheduling.maxSequences": "sequences in one step at most",
    "scheduling.maxQueuedRequests": "waiting requests beyond which new ones get 503",
    "scheduling.maxQueuedTokens": "waiting prompt tokens beyond which new requests get 503",
    "scheduling.policy": "order of the queue",
    "scheduling.preemption": "what happens to sequences that must give up their blocks",
    "scheduling.classes": "traffic classes",
    "scheduling.defaultClass": "class of requests whose gateway names none",
    "scheduling.tenants": "tenants and their shares",
    "adapters": "LoRA adapters beside the base model; not served by this release",
    "drainSeconds": "time that open requests get on SIGTERM or /drain",
    "price.perDeviceHour": "what one device costs an hour; names the metric cost_total",
    "price.currency": "currency of that price",
    "blockKeySeed": "seed of the routing key in KV events; equal in gateway and engines",
}
"""One line per key, by its path in the file."""


@dataclass(frozen=True, slots=True)
class Key:
    """One leaf of the configuration file."""

    path: tuple[str, ...]
    type: Any
    default: Any

    @property
    def name(self) -> str:
        """Path as written in messages: `kvCache.blockTokens`."""
        return ".".join(self.path)

    @property
    def flag(self) -> str:
        """`--kv-cache-block-tokens`."""
        return "--" + "-".join(_split_camel(part) for part in self.path)

    @property
    def dest(self) -> str:
        """Name in the parsed arguments."""
        return "key_" + "_".join(self.path)


def list_keys(struct: type[msgspec.Struct] = EngineConfig, path: tuple[str, ...] = ()) -> Iterator[Key]:
    """Every leaf, depth first, in the order of the file."""
    hints = get_type_hints(struct, vars(engine_config))
    for field in msgspec.structs.fields(struct):
        kind = hints[field.name]
        here = (*path, field.encode_name)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield from list_keys(kind, here)
        else:
            yield Key(here, kind, None if field.default is msgspec.NODEFAULT else field.default)


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """`--config` and one flag per key."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="configuration file (YAML); flags override it"
    )
    group = parser.add_argument_group("configuration", "each flag is a key of the configuration file")
    for key in list_keys():
        options: dict[str, Any] = {"dest": key.dest, "default": None}
        kind = _strip_optional(key.type)
        shown = "" if key.default in (None, ()) else f" (default: {key.default})"
        options["help"] = f"{HELP[key.name]}{shown}".replace("%", "%%")
        if get_origin(kind) is Literal:
            options["choices"] = get_args(kind)
        elif kind in (int, float):
            options |= {"type": kind, "metavar": "N"}
        elif get_origin(kind) is tuple:
            options |= {"type": _parse_json, "metavar": "JSON"}
        else:
            options["metavar"] = "TEXT"
        group.add_argument(key.flag, **options)


def load_config(arguments: argparse.Namespace, *, fallback: dict[str, Any]) -> EngineConfig:
    """File, then flags over it, then `fallback` for keys neither names.

    Raises:
        ConfigError: unreadable file, unknown key, wrong value, contradiction.
    """
    data = _read_file(arguments.config) if arguments.config else {}
    for key in list_keys():
        value = getattr(arguments, key.dest)
        if value is not None:
            _put(data, key.path, value)
    for name, value in fallback.items():
        data.setdefault(name, value)
    try:
        config = parse_engine_config(data)
        check_config(config)
    except ConfigError as error:
        raise ConfigError(f"{arguments.config}: {error}" if arguments.config else str(error)) from error
    return config


def check_config(config: EngineConfig) -> None:
    """Rules that types cannot say.

    Raises:
        ConfigError: naming the key.
    """
    check_ranges(config)
    price = config.price.per_device_hour
    if price is not None and not 0 <= price < float("inf"):
        raise ConfigError(
            f"engine configuration: price.perDeviceHour is {price}; it must be a number from 0 up"
        )
    if not re.fullmatch(r"[A-Za-z]{1,16}", config.price.currency):
        raise ConfigError("engine configuration: price.currency must be 1 to 16 letters, as USD")
    for name, items in (("classes", config.scheduling.classes), ("tenants", config.scheduling.tenants)):
        names = [item.name for item in items]
        if len(set(names)) < len(names):
            raise ConfigError(f"engine configuration: scheduling.{name} holds a name twice")
    adapters = [adapter.name for adapter in config.adapters]
    if len({config.model_name, *adapters}) < 1 + len(adapters):
        raise ConfigError("engine configuration: adapters and modelName must all differ")


def _read_file(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"engine configuration: {path} cannot be read: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"engine configuration: {path} must hold a mapping")
    return data


def _put(data: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for part in path[:-1]:
        data = data.setdefault(part, {})
        if not isinstance(data, dict):
            raise ConfigError(f"engine configuration: {part} must be a mapping")
    data[path[-1]] = value


def _parse_json(text: str) -> Any:
    try:
        return msgspec.json.decode(text.encode())
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error


def _strip_optional(kind: Any) -> Any:
    members = [member for member in get_args(kind) if member is not type(None)]
    union = get_origin(kind) is Union or type(kind).__name__ == "UnionType"
    return members[0] if union and len(members) == 1 else kind


def _split_camel(name: str) -> str:
    return "".join(f"-{char.lower()}" if char.isupper() else char for char in name)
