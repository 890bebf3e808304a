"""Reading of InferencePool and Pod objects; pure. An object that cannot be read costs only itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from itertools import pairwise
from typing import Any

from millpond_common.contract import labels, ports
from millpond_gateway.routing.records import Policy, Role
from millpond_gateway.world.records import Peer, PoolClass, PoolPricing, PoolTenant, PoolView, Replica

_ROLES = {labels.ROLE_PREFILL: Role.PREFILL, labels.ROLE_DECODE: Role.DECODE}
_DEFAULT_HOLD_SECONDS = 300.0
_DEFAULT_CLASSES = (
    PoolClass(name="interactive", priority=100),
    PoolClass(name="agent", priority=50),
    PoolClass(name="batch", priority=0),
)

Object = Mapping[str, Any]


def parse_pool(obj: Object) -> PoolView | None:
    """An InferencePool; None when its gateway is switched off.

    Raises:
        KeyError, TypeError, ValueError: the object has another shape.
    """
    spec, metadata = obj["spec"], obj["metadata"]
    gateway = spec.get("gateway") or {}
    if gateway.get("enabled") is False:
        return None
    model, engine = spec["model"], spec.get("engine") or {}
    scheduling = spec.get("scheduling") or {}
    start_seconds = _parse_start(obj)
    weights, warnings = _find_weights(metadata)
    return PoolView(
        name=metadata["name"],
        model=model.get("name") or metadata["name"],
        root=_parse_root(model.get("source", "")),
        adapters=tuple(adapter["name"] for adapter in model.get("adapters") or ()),
        policy=Policy(gateway.get("routing") or Policy.AUTO),
        price_of_recompute=float(gateway.get("priceOfRecompute", 5)),
        max_model_tokens=engine.get("maxModelTokens"),
        block_tokens=(engine.get("kvCache") or {}).get("blockTokens", 16),
        classes=tuple(_parse_class(entry) for entry in scheduling.get("classes") or ()) or _DEFAULT_CLASSES,
        default_class=scheduling.get("defaultClass") or "interactive",
        tenants=tuple(_parse_tenant(entry) for entry in scheduling.get("tenants") or ()),
        pricing=_parse_pricing(scheduling.get("pricing")),
        cold_start_hold_seconds=_parse_hold(spec, start_seconds),
        may_be_zero=(spec.get("scaling") or {}).get("minReplicas") == 0,
        start_seconds=start_seconds,
        revision_weights=weights,
        warnings=warnings,
        created_at=_parse_time(metadata.get("creationTimestamp")),
        deleting="deletionTimestamp" in metadata,
    )


def _parse_root(source: str) -> str:
    """Name of the hub repository; other sources mean nothing to a client."""
    scheme, _, rest = source.partition("://")
    return "/".join(rest.split("/")[:2]) if scheme == "hf" else ""


def _parse_class(entry: Object) -> PoolClass:
    ttft = entry.get("ttftMilliseconds")
    gate = entry.get("admitWhileQueued") or {}
    return PoolClass(
        name=entry["name"],
        priority=entry.get("priority", 0),
        ttft_seconds=ttft / 1000 if ttft is not None else None,
        gate_class=gate.get("class"),
        gate_below=gate.get("below", 1),
    )


def _parse_tenant(entry: Object) -> PoolTenant:
    return PoolTenant(
        name=entry["name"],
        weight=entry.get("weight", 1),
        max_concurrency=entry.get("maxConcurrency"),
        tokens_per_minute=entry.get("tokensPerMinute"),
        key_secret=(entry.get("apiKeySecretRef") or {}).get("name"),
    )


def _parse_pricing(entry: Object | None) -> PoolPricing | None:
    if not entry:
        return None
    price = entry.get("inputPerMillion", 0)
    return PoolPricing(
        currency=entry.get("currency", ""),
        input_per_million=float(price),
        cached_input_per_million=float(entry.get("cachedInputPerMillion", price)),
        output_per_million=float(entry.get("outputPerMillion", 0)),
    )


def _parse_hold(spec: Object, start_seconds: float | None) -> float:
    """A pool that may be at zero, by its own scaling or because somebody set replicas to 0, holds requests.

    Without a time of its own, long enough for the start that was measured, and half of it more.
    """
    scaling = spec.get("scaling") or {}
    may_be_zero = scaling.get("minReplicas") == 0 or spec.get("replicas") == 0
    default = max(_DEFAULT_HOLD_SECONDS, 1.5 * (start_seconds or 0.0))
    return float(scaling.get("coldStartHoldSeconds", default)) if may_be_zero else 0.0


def _parse_start(obj: Object) -> float | None:
    """Start time the operator measured, from the pool's status."""
    seconds = ((obj.get("status") or {}).get("scaling") or {}).get("startSeconds")
    return float(seconds) if seconds is not None else None


def _find_weights(metadata: Object) -> tuple[dict[str, float], tuple[str, ...]]:
    """Weights of the annotation, and what is wrong with it: a slip there must not take the pool away."""
    text = (metadata.get("annotations") or {}).get(labels.REVISION_WEIGHTS, "")
    try:
        return parse_weights(text), ()
    except ValueError as error:
        return {}, (f"{labels.REVISION_WEIGHTS}: {error}",)


def parse_weights(text: str) -> dict[str, float]:
    """Weights by revision from `REVISION=WEIGHT[,...]`.

    Raises:
        ValueError: it is written in another way, or a weight is no finite number from 0 on.
    """
    weights: dict[str, float] = {}
    for entry in filter(None, text.replace(" ", "").split(",")):
        revision, separator, weight = entry.partition("=")
        try:
            number = float(weight)
        except ValueError:
            number = math.nan
        if not separator or not revision or not math.isfinite(number) or number < 0:
            raise ValueError(f"{entry!r}: write REVISION=WEIGHT, for example 5f7c9=90")
        weights[revision] = number
    return weights


def _parse_time(text: str | None) -> int:
    return int(datetime.fromisoformat(text).timestamp()) if text else 0


def parse_replica(obj: Object) -> Replica | None:
    """An engine pod; None when it is none, has no address, or has ended.

    Raises:
        KeyError, TypeError, ValueError: the object has another shape.
    """
    metadata, status = obj["metadata"], obj.get("status") or {}
    pod_labels = metadata.get("labels") or {}
    pool = pod_labels.get(labels.POOL)
    address = status.get("podIP")
    if not pool or not address or status.get("phase") in {"Succeeded", "Failed"}:
        return None
    if pod_labels.get(labels.COMPONENT, labels.ENGINE_COMPONENT) != labels.ENGINE_COMPONENT:
        return None
    host = f"[{address}]" if ":" in address else address
    return Replica(
        uid=metadata["uid"],
        pod=metadata["name"],
        pool=pool,
        address=f"{host}:{_find_port(obj)}",
        revision=pod_labels.get(labels.REVISION, ""),
        role=_ROLES.get(pod_labels.get(labels.ROLE, ""), Role.BOTH),
        ready=_is_ready(status),
        cordoned=pod_labels.get(labels.CORDONED) == "true" or "deletionTimestamp" in metadata,
    )


def parse_peer(obj: Object) -> Peer | None:
    """Another gateway's pod; None without an address.

    Raises:
        KeyError, TypeError, ValueError: the object has another shape.
    """
    metadata, status = obj["metadata"], obj.get("status") or {}
    address = status.get("podIP")
    if not address or status.get("phase") in {"Succeeded", "Failed"}:
        return None
    host = f"[{address}]" if ":" in address else address
    takes = _is_ready(status) and "deletionTimestamp" not in metadata
    workers = range(_count_workers(obj)) if takes else ()
    return Peer(host=address, addresses=tuple(f"{host}:{ports.GATEWAY_PEERS + number}" for number in workers))


def _count_workers(obj: Object) -> int:
    """Worker processes of a gateway's pod, from its own arguments: `--workers N` or `--workers=N`."""
    for container in (obj.get("spec") or {}).get("containers") or ():
        arguments = [*(container.get("args") or ()), ""]
        for argument, following in pairwise(arguments):
            name, separator, value = argument.partition("=")
            if name == "--workers" and (value if separator else following).isdigit():
                return min(max(1, int(value if separator else following)), ports.MAX_GATEWAY_WORKERS)
    return 1


def _is_ready(status: Object) -> bool:
    conditions = status.get("conditions") or ()
    return any(entry.get("type") == "Ready" and entry.get("status") == "True" for entry in conditions)


def _find_port(obj: Object) -> int:
    """The engine container's port named http, else the contract's."""
    for container in (obj.get("spec") or {}).get("containers") or ():
        if container.get("name") != labels.ENGINE_CONTAINER:
            continue
        for port in container.get("ports") or ():
            if port.get("name") == "http":
                return int(port["containerPort"])
    return ports.ENGINE_HTTP
