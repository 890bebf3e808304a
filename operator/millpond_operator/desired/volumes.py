"""Volumes of an engine pod, their mounts, and the init containers that fill them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millpond_common.contract import labels
from millpond_operator.api.pool import InferencePool
from millpond_operator.desired.env import make_env
from millpond_operator.desired.model import MODELS_PATH, Placement, place_adapters, place_model
from millpond_operator.desired.names import make_claim_name
from millpond_operator.desired.settings import BuildSettings

CONFIG_PATH = "/etc/millpond"
CONFIG_KEY = "engine.yaml"
_MODELS = {"name": "millpond-models", "mountPath": MODELS_PATH}
_TMP = {"name": "millpond-tmp", "mountPath": "/tmp"}  # noqa: S108 - a mount of the container, not a file of ours


def make_volumes(pool: InferencePool, *, config_name: str, settings: BuildSettings) -> list[dict[str, Any]]:
    """Everything the containers mount."""
    volumes: list[dict[str, Any]] = [
        {
            "name": "millpond-config",
            "configMap": {"name": config_name, "items": [{"key": CONFIG_KEY, "path": CONFIG_KEY}]},
        },
        {"name": "millpond-tmp", "emptyDir": {}},
        {"name": "millpond-shm", "emptyDir": {"medium": "Memory"}},
    ]
    if _needs_models(pool):
        volumes.append({"name": "millpond-models", **_make_models_volume(pool, settings)})
    return volumes + [_make_source_volume(number, place) for number, place in enumerate(_list_mounted(pool))]


def make_engine_mounts(pool: InferencePool) -> list[dict[str, Any]]:
    """Mounts of the engine container; it reads models and never writes them."""
    mounts: list[dict[str, Any]] = [
        {"name": "millpond-config", "mountPath": CONFIG_PATH, "readOnly": True},
        dict(_TMP),
        {"name": "millpond-shm", "mountPath": "/dev/shm"},  # noqa: S108 - a mount of the container
    ]
    if _needs_models(pool):
        mounts.append({**_MODELS, "readOnly": True})
    for number, place in enumerate(_list_mounted(pool)):
        mounts.append({"name": f"millpond-source-{number}", "mountPath": place.mount_path, "readOnly": True})
    return mounts


def make_init_containers(
    pool: InferencePool, *, make_base: Callable[[], dict[str, Any]], resources: dict[str, Any]
) -> list[dict[str, Any]]:
    """The fetch steps, model first; a model that is mounted is only looked at, one inside the image not even that."""
    containers: list[dict[str, Any]] = []
    if place_model(pool).mount is not None:
        containers.append(_make_inspect(place_model(pool), base=make_base(), resources=resources))
    if not _needs_models(pool):
        return containers
    if pool.spec.model.cache.type == "Node":
        containers.append(_make_prepare(make_base(), resources))
    for number, place in enumerate([place_model(pool), *place_adapters(pool).values()]):
        if place.fetch is not None:
            name = labels.FETCH_CONTAINER if number == 0 else f"fetch-adapter-{number - 1}"
            containers.append(_make_fetch(pool, name, place, base=make_base(), resources=resources))
    return containers


def _make_fetch(
    pool: InferencePool, name: str, place: Placement, *, base: dict[str, Any], resources: dict[str, Any]
) -> dict[str, Any]:
    assert place.fetch is not None
    model = pool.spec.model
    container = {
        "name": name,
        **base,
        "args": place.fetch.make_args(),
        "resources": resources,
        "volumeMounts": [dict(_MODELS), dict(_TMP)],
    }
    if model.secret_ref is not None:
        container["envFrom"] = [{"secretRef": {"name": model.secret_ref.name}}]
    if model.env:
        container["env"] = make_env(model.env)
    return container


def _make_inspect(place: Placement, *, base: dict[str, Any], resources: dict[str, Any]) -> dict[str, Any]:
    """Look at a mounted model before the engine does: is it there, and what memory does it need."""
    source = {"name": "millpond-source-0", "mountPath": place.mount_path, "readOnly": True}
    return {
        "name": labels.INSPECT_CONTAINER,
        **base,
        "args": ["inspect", "--path", place.path],
        "resources": resources,
        "volumeMounts": [source, dict(_TMP)],
    }


def _make_prepare(base: dict[str, Any], resources: dict[str, Any]) -> dict[str, Any]:
    """Open the node's directory to the engine's user; the kubelet makes it as root, and fsGroup skips host paths."""
    security = base["securityContext"] | {
        "runAsNonRoot": False,
        "runAsUser": 0,
        "capabilities": {"drop": ["ALL"], "add": ["FOWNER"]},
    }
    return {
        **base,
        "name": "prepare-cache",
        "command": ["chmod", "1777", MODELS_PATH],
        "securityContext": security,
        "resources": resources,
        "volumeMounts": [dict(_MODELS)],
    }


def _make_models_volume(pool: InferencePool, settings: BuildSettings) -> dict[str, Any]:
    cache = pool.spec.model.cache
    if cache.type == "Claim":
        name = cache.claim_name or make_claim_name(pool.metadata.name)
        return {"persistentVolumeClaim": {"claimName": name}}
    if cache.type == "Node":
        return {"hostPath": {"path": settings.node_cache_path, "type": "DirectoryOrCreate"}}
    return {"emptyDir": {"sizeLimit": cache.size_limit} if cache.size_limit else {}}


def _make_source_volume(number: int, place: Placement) -> dict[str, Any]:
    assert place.mount is not None
    name = f"millpond-source-{number}"
    if place.mount.scheme == "pvc":
        claim = {"claimName": place.mount.location, "readOnly": True}
        return {"name": name, "persistentVolumeClaim": claim}
    return {"name": name, "image": {"reference": place.mount.location}}


def _needs_models(pool: InferencePool) -> bool:
    return any(place.fetch is not None for place in _list_placements(pool))


def _list_mounted(pool: InferencePool) -> list[Placement]:
    return [place for place in _list_placements(pool) if place.mount is not None]


def _list_placements(pool: InferencePool) -> list[Placement]:
    return [place_model(pool), *place_adapters(pool).values()]
