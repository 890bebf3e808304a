"""Valid InferencePools for tests, to be changed in one place."""

from __future__ import annotations

import copy
from typing import Any

Manifest = dict[str, Any]
Change = Any
REMOVE = object()
"""As a new value: take the field away."""


def make_pool(name: str = "pool", **spec: Any) -> Manifest:
    """The smallest pool: a source and what a replica gets; `spec` adds or replaces its fields."""
    return {
        "apiVersion": "millpond.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": name},
        "spec": {
            "model": {"source": "file:///models/tiny.gguf"},
            "resources": {"limits": {"cpu": "1", "memory": "1Gi"}},
            **spec,
        },
    }


def make_full_pool() -> Manifest:
    """A pool with a fixed count in which every other field has a value."""
    return make_pool(
        model=make_full_model(),
        engine=make_full_engine(),
        resources=make_full_resources(),
        scheduling=make_full_scheduling(),
        replicas=2,
        gateway={"enabled": True, "routing": "Prefix", "priceOfRecompute": 7},
        rollout={
            "strategy": "Replace",
            "maxUnavailable": 1,
            "drainSeconds": 600,
            "gate": {"ttftMilliseconds": 900, "errorPercent": 1, "bakeSeconds": 120},
        },
        template=make_full_template(),
    )


def make_scaled_pool() -> Manifest:
    """A pool whose count the autoscaler owns, every field of `scaling` with a value."""
    return make_pool(scaling=make_full_scaling())


def make_split_pool() -> Manifest:
    """A pool of two roles, one with a fixed count, one scaled."""
    prefill = {"replicas": 2, "resources": make_full_resources(), "template": make_full_template()}
    decode = {
        "scaling": make_full_scaling(),
        "resources": make_full_resources(),
        "template": make_full_template(),
    }
    pool = make_pool(disaggregation={"prefill": prefill, "decode": decode, "maxDevices": 12})
    pool["spec"]["engine"] = {"tensorParallelSize": 2}
    pool["spec"]["resources"] = {"limits": {"nvidia.com/gpu": 2}}
    return pool


def make_full_model() -> Manifest:
    """Every field of `model`."""
    return {
        "name": "team/tiny-1.0",
        "source": "hf://owner/repo/tiny.gguf",
        "revision": "main",
        "sha256": "ab" * 32,
        "secretRef": {"name": "hub"},
        "env": make_full_env(),
        "cache": {
            "type": "Claim",
            "sizeLimit": "10Gi",
            "storageClassName": "fast",
            "accessMode": "ReadWriteMany",
        },
        "adapters": [{"name": "sql", "source": "hf://owner/sql/a.safetensors", "sha256": "cd" * 32}],
    }


def make_full_env() -> list[Manifest]:
    """Every form of an environment variable."""
    secret = {"secretKeyRef": {"name": "proxy", "key": "url", "optional": True}}
    config = {"configMapKeyRef": {"name": "settings", "key": "level", "optional": False}}
    return [
        {"name": "PLAIN", "value": "https://hub.example"},
        {"name": "FROM_SECRET", "valueFrom": secret},
        {"name": "FROM_CONFIG", "valueFrom": config},
        {"name": "HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}},
    ]


def make_full_engine() -> Manifest:
    """Every field of `engine`."""
    return {
        "image": "registry.example/engine:1",
        "imagePullPolicy": "IfNotPresent",
        "imagePullSecrets": [{"name": "pull"}],
        "dtype": "BFloat16",
        "maxModelTokens": 4096,
        "defaultOutputTokens": 256,
        "tensorParallelSize": 2,
        "startupSeconds": 600,
        "kvCache": {
            "blockTokens": 32,
            "devicePercent": 80,
            "deviceMemory": "8Gi",
            "hostMemory": "16Gi",
            "disk": {"size": "100Gi"},
            "store": {"mooncake": {"masterAddress": "mooncake-master:50051"}},
        },
        "extraArgs": ["--log-level=debug"],
        "env": make_full_env(),
    }


def make_full_resources() -> Manifest:
    """Every field of `resources`; two GPUs."""
    return {
        "limits": {"nvidia.com/gpu": 2, "cpu": "8", "memory": "64Gi"},
        "requests": {"cpu": "500m"},
        "claims": [{"name": "nic", "request": "fast"}],
    }


def make_full_scheduling() -> Manifest:
    """Every field of `scheduling`."""
    price = {
        "inputPerMillion": "0.20",
        "cachedInputPerMillion": "0.02",
        "outputPerMillion": "0.80",
        "currency": "EUR",
    }
    interactive = {
        "name": "interactive",
        "priority": 100,
        "ttftMilliseconds": 700,
        "itlMilliseconds": 60,
        "reservedKVPercent": 30,
        "maxSharePercent": 90,
    }
    batch = {"name": "batch", "admitWhileQueued": {"class": "interactive", "below": 4}}
    return {
        "maxBatchTokens": 1024,
        "maxSequences": 64,
        "maxQueuedRequests": 100,
        "maxQueuedTokens": 100000,
        "policy": "Deadline",
        "preemption": "Recompute",
        "classes": [interactive, batch],
        "defaultClass": "interactive",
        "tenants": [
            {
                "name": "acme",
                "weight": 3,
                "maxConcurrency": 64,
                "tokensPerMinute": 100000,
                "maxCachePercent": 40,
                "apiKeySecretRef": {"name": "acme-keys"},
            }
        ],
        "pricing": price,
    }


def make_full_scaling() -> Manifest:
    """Every field of `scaling`."""
    return {
        "minReplicas": 1,
        "maxReplicas": 8,
        "targets": {"queuedTokens": 9000, "kvPercent": 70, "ttftMilliseconds": 500},
        "scaleDownStabilizationSeconds": 120,
        "idleSeconds": 900,
        "coldStartHoldSeconds": 60,
        "warmFloor": "Bursts",
    }


def make_full_template() -> Manifest:
    """Every field of `template`, with content in its free parts."""
    return {
        "metadata": {"labels": {"team": "search"}, "annotations": {"example.com/note": "x"}},
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "topology.kubernetes.io/zone",
                "whenUnsatisfiable": "ScheduleAnyway",
            }
        ],
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
        "serviceAccountName": "engines",
        "securityContext": {"fsGroup": 1000},
        "resourceClaims": [
            {"name": "nic", "resourceClaimTemplateName": "nics"},
            {"name": "disk", "resourceClaimName": "one"},
        ],
        "volumes": [{"name": "extra", "configMap": {"name": "extra"}}],
        "volumeMounts": [{"name": "extra", "mountPath": "/extra", "readOnly": True}],
    }


def changed(pool: Manifest, path: str, value: Change) -> Manifest:
    """A copy with one field set, or taken away by REMOVE. Numbers in the path index lists; missing maps are made."""
    copied = copy.deepcopy(pool)
    *parents, last = path.split(".")
    place: Any = copied
    for part in parents:
        place = place[int(part)] if isinstance(place, list) else place.setdefault(part, {})
    if value is REMOVE:
        del place[last]
    elif isinstance(place, list):
        place[int(last)] = value
    else:
        place[last] = value
    return copied
