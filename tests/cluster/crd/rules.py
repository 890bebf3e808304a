"""One case for each CEL rule of the CRD: a valid base object and single changes that pass or are refused.

The message is the beginning of the rule's own, which tells rules apart. A rule that stands at several places
(names, sources, checksums, sizes, prices, roles) has a case for each place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.support.pools import (
    REMOVE,
    Manifest,
    changed,
    make_full_pool,
    make_pool,
    make_scaled_pool,
    make_split_pool,
)

Change = tuple[str, Any]


@dataclass(frozen=True)
class Rule:
    """A rule's message, a valid object, and changes of one field."""

    message: str
    base: Manifest
    accepted: list[Change]
    refused: list[Change]


def at(path: str, *values: Any) -> list[Change]:
    """The same field with several values."""
    return [(path, value) for value in values]


POOL = make_pool(replicas=1)
FULL = make_full_pool()
SCALED = make_scaled_pool()
SPLIT = make_split_pool()
HUB = make_pool(model={"source": "hf://owner/repo"})
ADAPTER = make_pool(
    model={"name": "base", "source": "hf://o/r", "adapters": [{"name": "sql", "source": "hf://o/s"}]}
)
CLAIM = make_pool(model={"source": "hf://o/r", "cache": {"type": "Claim", "sizeLimit": "1Gi"}})
TP2 = {"tensorParallelSize": 2}
GPU = make_pool(engine=TP2, resources={"limits": {"nvidia.com/gpu": 2}})
TWO_ROLES = make_pool(
    engine=TP2,
    disaggregation={
        "prefill": {"resources": {"limits": {"nvidia.com/gpu": 2}}},
        "decode": {"resources": {"limits": {"nvidia.com/gpu": "2"}}},
    },
    resources={"limits": {"nvidia.com/gpu": 2}},
)
OWN_RESOURCES = changed(TWO_ROLES, "spec.resources", REMOVE)
HOST = make_pool(engine={"kvCache": {"hostMemory": "512Mi"}})
ROLES = "spec.disaggregation"
CLASSES = "spec.scheduling.classes"
HOLD = {"minReplicas": 0, "maxReplicas": 2, "coldStartHoldSeconds": 60}
TO_ZERO = {"prefill": {"scaling": HOLD}, "decode": {"scaling": HOLD}}
GPUS_WRONG = [
    {"nvidia.com/gpu": 1},
    {"nvidia.com/gpu": 4},
    {"nvidia.com/gpu": 2, "amd.com/gpu": 2},
    {"cpu": 4},
]
GPUS_RIGHT = [{"nvidia.com/gpu": "2"}, {"amd.com/gpu": 2}, {"nvidia.com/gpu": 1, "amd.com/gpu": 1}]

GOOD_SOURCES = [
    "hf://owner/repo", "hf://o-w.n/r_e.p/dir/a.gguf", "pvc://claim", "pvc://claim.x/a/b", "s3://bucket/key",
    "oci://r.io/i:1", "oci://r.io/i@sha256:ab", "http://h/f", "https://h:8443/f?x=1", "file:///m",
]  # fmt: skip
BAD_SOURCES = [
    "ftp://h/f", "owner/repo", "hf://owner", "hf://a/b/", "pvc://Claim", "s3://bucket", "s3://bucket/", "oci://",
    "http://h", "https:///f", "file://m", "hf://o/r x", "xhf://o/r", "hf:/o/r/x",
]  # fmt: skip
GOOD_NAMES = ["a", "Qwen/Qwen3-8B", "llama-3.1:8b_q4"]
BAD_NAMES = ["-a", "a/", "two words", "naïve"]
GOOD_SIZES = ["1", "1.5Gi", "10G", "1e9"]
BAD_SIZES = ["0", "-1Gi", "10GB", "much", "1m"]
GOOD_PRICES = ["0", "0.20", "123456789.12345678"]
BAD_PRICES = ["-1", "1,5", ".5", "1.", "1e3", "free"]

METADATA_AND_SPEC = [
    Rule(
        "metadata.name names Services and labels",
        POOL,
        at("metadata.name", "a", "llama-3-8b", "x" * 63),
        at("metadata.name", "3b", "a.b", "x" * 64),
    ),
    Rule(
        "an adapter is called like the pool",
        changed(ADAPTER, "spec.model.name", REMOVE),
        at("metadata.name", "other"),
        at("metadata.name", "sql"),
    ),
    Rule(
        "write replicas or scaling, not both; with scaling",
        POOL,
        at("spec.replicas", REMOVE, 0, 3),
        at("spec.scaling", {"maxReplicas": 2}),
    ),
    Rule(
        "with disaggregation each role has its own count",
        SPLIT,
        at(f"{ROLES}.prefill.replicas", 4, REMOVE),
        [("spec.replicas", 2), ("spec.scaling", {"maxReplicas": 2})],
    ),
    Rule(
        "write resources.limits",
        POOL,
        at("spec.resources", {"limits": {"nvidia.com/gpu": 1}}, {"limits": {"cpu": 2}}),
        at("spec.resources", REMOVE),
    ),
    Rule(
        "write resources.limits",
        OWN_RESOURCES,
        at("spec.resources", {"limits": {"nvidia.com/gpu": 2}}),
        [(f"{ROLES}.prefill.resources", REMOVE), (f"{ROLES}.decode.resources", REMOVE)],
    ),
    Rule(
        "scaling reads its demand from the gateway",
        SCALED,
        at("spec.gateway", {"enabled": True}, {}),
        at("spec.gateway", {"enabled": False}),
    ),
    Rule(
        "with disaggregation the gateway pairs",
        SPLIT,
        at("spec.gateway", {"enabled": True}),
        at("spec.gateway", {"enabled": False}),
    ),
    Rule(
        "a replica uses exactly engine.tensorParallelSize GPUs",
        GPU,
        at("spec.resources.limits", *GPUS_RIGHT),
        [*at("spec.resources.limits", *GPUS_WRONG), ("spec.engine.tensorParallelSize", 1)],
    ),
    Rule(
        "a replica uses exactly engine.tensorParallelSize GPUs",
        POOL,
        at(
            "spec.resources",
            {"limits": {"nvidia.com/gpu": 1}},
            {"limits": {"cpu": 1}, "claims": [{"name": "gpus"}]},
        ),
        [("spec.engine", TP2), ("spec.resources.limits", {"nvidia.com/gpu": 0})],
    ),
    *(
        Rule(
            f"a {role} replica uses exactly engine.tensorParallelSize GPUs",
            TWO_ROLES,
            at(f"{ROLES}.{role}.resources.limits", *GPUS_RIGHT),
            at(f"{ROLES}.{role}.resources.limits", *GPUS_WRONG),
        )
        for role in ("prefill", "decode")
    ),
    Rule(
        "engine.kvCache.hostMemory is part of the container's memory",
        HOST,
        [("spec.engine.kvCache.hostMemory", "1023Mi"), ("spec.resources.limits", {"cpu": 1})],
        [("spec.engine.kvCache.hostMemory", "1Gi"), ("spec.resources.limits.memory", 536870912)],
    ),
]

MODEL = [
    Rule(
        "model.revision belongs to hf:// sources",
        HUB,
        at("spec.model.revision", "main"),
        at("spec.model", {"source": "file:///m", "revision": "main"}),
    ),
    Rule(
        "model.sha256 is the checksum of one file",
        POOL,
        at(
            "spec.model",
            *({"source": s, "sha256": "0" * 64} for s in GOOD_SOURCES if s[:3] not in ("oci", "hf:")),
        ),
        at("spec.model", *({"source": s, "sha256": "0" * 64} for s in ("hf://o/r", "oci://r.io/i:1"))),
    ),
    Rule(
        "model.sha256 is the checksum of one file",
        HUB,
        at("spec.model", {"source": "hf://o/r/a.gguf", "sha256": "0" * 64}),
        at("spec.model.sha256", "0" * 64),
    ),
    Rule(
        "an adapter may not be called like model.name",
        ADAPTER,
        at("spec.model.name", "other"),
        [("spec.model.name", "sql"), ("spec.model.adapters.0.name", "base")],
    ),
    Rule(
        "a pvc:// or file:// source is used where it lies",
        CLAIM,
        at("spec.model.source", "hf://o/r", "s3://bucket/k", "http://h/f"),
        at("spec.model.source", "pvc://claim/m", "file:///m"),
    ),
    Rule(
        "write letters, digits and",
        POOL,
        at("spec.model.name", *GOOD_NAMES),
        at("spec.model.name", *BAD_NAMES),
    ),
    Rule(
        "write letters, digits and",
        ADAPTER,
        at("spec.model.adapters.0.name", *GOOD_NAMES),
        at("spec.model.adapters.0.name", *BAD_NAMES),
    ),
    Rule(
        "write hf://OWNER/REPO",
        POOL,
        at("spec.model.source", *GOOD_SOURCES),
        at("spec.model.source", *BAD_SOURCES),
    ),
    Rule(
        "write hf://OWNER/REPO",
        ADAPTER,
        at("spec.model.adapters.0.source", *GOOD_SOURCES),
        at("spec.model.adapters.0.source", *BAD_SOURCES),
    ),
    *(
        Rule(
            "write the SHA-256",
            FULL,
            at(path, "0123456789abcdef" * 4),
            at(path, "0" * 63, "A" * 64, "sha256:" + "0" * 57),
        )
        for path in ("spec.model.sha256", "spec.model.adapters.0.sha256")
    ),
    *(
        Rule(
            "write value or valueFrom",
            FULL,
            at(f"{path}.0.value", "", REMOVE),
            at(f"{path}.0.valueFrom", {"fieldRef": {"fieldPath": "x"}}),
        )
        for path in ("spec.model.env", "spec.engine.env")
    ),
    Rule(
        "claimName, storageClassName and accessMode belong to type Claim",
        HUB,
        at("spec.model.cache", {"type": "Node", "sizeLimit": "1Gi"}, {}),
        at(
            "spec.model.cache",
            {"claimName": "c"},
            {"type": "Node", "storageClassName": "s"},
            {"accessMode": "ReadWriteOnce"},
        ),
    ),
    Rule(
        "type Claim needs claimName",
        CLAIM,
        at("spec.model.cache", {"type": "Claim", "claimName": "weights"}),
        at("spec.model.cache", {"type": "Claim"}),
    ),
    Rule(
        "storageClassName and accessMode are for a claim the operator makes",
        changed(CLAIM, "spec.model.cache.claimName", "weights"),
        at("spec.model.cache.sizeLimit", "2Gi"),
        [("spec.model.cache.storageClassName", "s"), ("spec.model.cache.accessMode", "ReadWriteMany")],
    ),
    *(
        Rule("write a size in bytes", FULL, at(path, *GOOD_SIZES), at(path, *BAD_SIZES))
        for path in (
            "spec.model.cache.sizeLimit",
            "spec.engine.kvCache.deviceMemory",
            "spec.engine.kvCache.hostMemory",
            "spec.engine.kvCache.disk.size",
        )
    ),
    Rule(
        "write HOST:PORT",
        FULL,
        at("spec.engine.kvCache.store.mooncake.masterAddress", "m:1", "10.0.0.1:50051"),
        at("spec.engine.kvCache.store.mooncake.masterAddress", "master", "http://m:1", "m:port"),
    ),
]

SCHEDULING = [
    Rule(
        "defaultClass names no entry",
        FULL,
        at("spec.scheduling.defaultClass", "batch"),
        [("spec.scheduling.defaultClass", "slow"), (CLASSES, [{"name": "other"}])],
    ),
    Rule(
        "the reservedKVPercent of all classes",
        FULL,
        at(f"{CLASSES}.1.reservedKVPercent", 0, 60),
        at(f"{CLASSES}.1.reservedKVPercent", 61, 90),
    ),
    Rule(
        "an admitWhileQueued.class names no entry",
        FULL,
        at(f"{CLASSES}.1.admitWhileQueued", {"class": "interactive", "below": 1}),
        at(f"{CLASSES}.1.admitWhileQueued", {"class": "agent", "below": 1}),
    ),
    Rule(
        "reservedKVPercent is larger than maxSharePercent",
        FULL,
        at(f"{CLASSES}.0.maxSharePercent", 30),
        at(f"{CLASSES}.0.maxSharePercent", 29),
    ),
    Rule(
        "admitWhileQueued.class names the class itself",
        FULL,
        at(f"{CLASSES}.1.admitWhileQueued.class", "interactive"),
        at(f"{CLASSES}.1.admitWhileQueued.class", "batch"),
    ),
    *(
        Rule("write a decimal number in quotes", FULL, at(path, *GOOD_PRICES), at(path, *BAD_PRICES))
        for path in (
            "spec.scheduling.pricing.inputPerMillion",
            "spec.scheduling.pricing.cachedInputPerMillion",
            "spec.scheduling.pricing.outputPerMillion",
        )
    ),
]

SCALING = [
    Rule(
        "minReplicas is larger", SCALED, at("spec.scaling.minReplicas", 8), at("spec.scaling.minReplicas", 9)
    ),
    Rule(
        "with minReplicas 0 write coldStartHoldSeconds",
        changed(SCALED, "spec.scaling.minReplicas", 0),
        at("spec.scaling.coldStartHoldSeconds", 0),
        at("spec.scaling.coldStartHoldSeconds", REMOVE),
    ),
    Rule(
        "prefill and decode go to zero and wake together",
        SPLIT,
        at(ROLES, TO_ZERO),
        [(f"{ROLES}.decode.scaling.minReplicas", 0), (ROLES, {**TO_ZERO, "prefill": {"replicas": 1}})],
    ),
    *(
        Rule(
            "write replicas or scaling for the role",
            SPLIT,
            at(f"{ROLES}.{role}", {"scaling": {"maxReplicas": 2}}, {"replicas": 2}),
            at(f"{ROLES}.{role}", {"scaling": {"maxReplicas": 2}, "replicas": 2}),
        )
        for role in ("prefill", "decode")
    ),
]

ROLLOUT_AND_TEMPLATE = [
    Rule(
        "strategy Replace takes a replica away",
        POOL,
        at("spec.rollout", {"strategy": "Surge"}, {"strategy": "Replace", "maxUnavailable": 1}),
        at("spec.rollout", {"strategy": "Replace"}),
    ),
    Rule(
        "a gate needs something to measure",
        POOL,
        at("spec.rollout", {"gate": {"errorPercent": 1}}, {"gate": {"ttftMilliseconds": 500}}),
        at("spec.rollout", {"gate": {}}, {"gate": {"bakeSeconds": 60}}),
    ),
    *(
        rule
        for place in ("spec.template", f"{ROLES}.prefill.template")
        for rule in (
            Rule(
                "labels under millpond.dev/",
                SPLIT,
                at(f"{place}.metadata.labels", {"a": "b"}, {"app.kubernetes.io/version": "1"}),
                at(f"{place}.metadata.labels", {"millpond.dev/pool": "x"}, {"app.kubernetes.io/name": "x"}),
            ),
            Rule(
                "annotations under millpond.dev/",
                SPLIT,
                at(f"{place}.metadata.annotations", {"a/b": "x"}),
                at(f"{place}.metadata.annotations", {"millpond.dev/revision": "x"}),
            ),
            Rule(
                'volume names that start with "millpond-"',
                SPLIT,
                at(f"{place}.volumes", [{"name": "data"}]),
                at(f"{place}.volumes", [{"name": "millpond-config"}]),
            ),
            Rule(
                "/models, /etc/millpond, /dev/shm and /tmp are mounted",
                SPLIT,
                at(f"{place}.volumeMounts", [{"name": "d", "mountPath": "/models-2"}]),
                [
                    (f"{place}.volumeMounts", [{"name": "d", "mountPath": path}])
                    for path in (
                        "/models",
                        "/models/x",
                        "/etc/millpond",
                        "/etc/millpond/x",
                        "/dev/shm",
                        "/tmp",
                    )
                ],
            ),
        )
    ),
]

RULES = [*METADATA_AND_SPEC, *MODEL, *SCHEDULING, *SCALING, *ROLLOUT_AND_TEMPLATE]
