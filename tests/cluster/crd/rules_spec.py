"""Rules of metadata and between the parts of spec."""

from __future__ import annotations

from tests.cluster.crd.rules_base import (
    ADAPTER,
    BAD_AMOUNTS,
    BAD_MEMORY,
    CLAIMING,
    FULL,
    GOOD_MEMORY,
    GPU,
    GPUS_RIGHT,
    GPUS_WRONG,
    HOST,
    OWN_RESOURCES,
    POOL,
    ROLES,
    SCALED,
    SPLIT,
    TP2,
    TWO_ROLES,
    Rule,
    at,
)
from tests.support.pools import REMOVE, changed

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
            {"limits": {"cpu": 1}},
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
        "resources.claims names a claim",
        CLAIMING,
        at("spec.resources.claims", [{"name": "nic"}], []),
        [("spec.resources.claims", [{"name": "gpu"}]), ("spec.template", {})],
    ),
    Rule(
        "template.volumeMounts names a volume",
        FULL,
        at(
            "spec.template.volumeMounts",
            [{"name": "extra", "mountPath": "/a"}, {"name": "extra", "mountPath": "/b"}],
        ),
        [
            ("spec.template.volumes", []),
            ("spec.template.volumeMounts", [{"name": "data", "mountPath": "/a"}]),
        ],
    ),
    *(
        Rule(
            f"disaggregation.{role}.resources.claims names a claim",
            SPLIT,
            at(f"{ROLES}.{role}.resources.claims", [{"name": "disk"}]),
            at(f"{ROLES}.{role}.resources.claims", [{"name": "gpu"}]),
        )
        for role in ("prefill", "decode")
    ),
    *(
        Rule(
            f"disaggregation.{role}.template.volumeMounts names a volume",
            changed(SPLIT, "spec.template", {"volumes": [{"name": "shared", "emptyDir": {}}]}),
            at(f"{ROLES}.{role}.template.volumeMounts", [{"name": "shared", "mountPath": "/s"}]),
            at(f"{ROLES}.{role}.template.volumeMounts", [{"name": "missing", "mountPath": "/s"}]),
        )
        for role in ("prefill", "decode")
    ),
    *(
        rule
        for base, place in ((GPU, "spec.resources"), (OWN_RESOURCES, f"{ROLES}.prefill.resources"))
        for rule in (
            Rule(
                "write cpu, memory, ephemeral-storage",
                base,
                at(
                    f"{place}.limits",
                    {"nvidia.com/gpu": 2, "hugepages-2Mi": "4Mi", "memory": "1Gi", "example.com/nic": 1},
                ),
                at(f"{place}.limits", {"nvidia.com/gpu": 2, "gpu": 1}, {"nvidia.com/gpu": 2, "/x": 1}),
            ),
            Rule(
                "a device cannot be shared out in parts",
                base,
                at(f"{place}.limits", {"nvidia.com/gpu": 2, "example.com/nic": "1k"}),
                at(f"{place}.limits", {"nvidia.com/gpu": 2, "example.com/nic": "500m"}),
            ),
            Rule(
                "write an amount that is not negative",
                base,
                at(f"{place}.limits.cpu", "1500m", 2, "0"),
                [*at(f"{place}.limits.cpu", *BAD_AMOUNTS), *at(f"{place}.requests", {"memory": "1GB"})],
            ),
            Rule(
                "a limit of memory or ephemeral-storage below 1Mi lacks its unit",
                base,
                at(f"{place}.limits.memory", *GOOD_MEMORY),
                [*at(f"{place}.limits.memory", *BAD_MEMORY), (f"{place}.limits.ephemeral-storage", "10")],
            ),
            Rule(
                "write requests of at most the limits",
                base,
                at(f"{place}.requests", {"cpu": "2"}, {"nvidia.com/gpu": "2"}, {}),
                at(f"{place}.requests", {"nvidia.com/gpu": 1}, {"example.com/nic": 1}),
            ),
        )
    ),
    Rule(
        "write requests of at most the limits",
        POOL,
        at("spec.resources.requests", {"cpu": "1000m"}, {"memory": "1073741824"}),
        at("spec.resources.requests", {"cpu": "1001m"}, {"memory": "1025Mi"}),
    ),
    Rule(
        "engine.kvCache.hostMemory is part of the container's memory",
        HOST,
        [("spec.engine.kvCache.hostMemory", "1023Mi"), ("spec.resources.limits", {"cpu": 1})],
        [("spec.engine.kvCache.hostMemory", "1Gi"), ("spec.resources.limits.memory", 536870912)],
    ),
]
