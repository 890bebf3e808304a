"""Rules of scheduling, scaling, rollout and template."""

from __future__ import annotations

from tests.cluster.crd.rules_base import (
    BAD_PRICES,
    CLASSES,
    FULL,
    GOOD_PRICES,
    POOL,
    ROLES,
    SCALED,
    SPLIT,
    TO_ZERO,
    Rule,
    at,
)
from tests.support.pools import REMOVE, changed

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
        for base, place in ((FULL, "spec.template"), (SPLIT, f"{ROLES}.prefill.template"))
        for rule in (
            Rule(
                "labels under millpond.dev/",
                base,
                at(f"{place}.metadata.labels", {"a": "b"}, {"app.kubernetes.io/version": "1"}),
                at(f"{place}.metadata.labels", {"millpond.dev/pool": "x"}, {"app.kubernetes.io/name": "x"}),
            ),
            *(
                Rule(
                    "write keys as [PREFIX/]NAME",
                    base,
                    at(f"{place}.{part}", {"a": "b"}, {"example.com/a_b.c-d": "x"}, {"x" * 63: ""}),
                    at(
                        f"{place}.{part}",
                        {"a b": "x"},
                        {"/a": "x"},
                        {"a/": "x"},
                        {"A.b/c/d": "x"},
                        {"x" * 64: "x"},
                    ),
                )
                for part in ("metadata.labels", "metadata.annotations", "nodeSelector")
            ),
            Rule(
                "write resourceClaimName or resourceClaimTemplateName",
                base,
                at(
                    f"{place}.resourceClaims",
                    [
                        {"name": "nic", "resourceClaimName": "one"},
                        {"name": "x", "resourceClaimTemplateName": "y"},
                    ],
                ),
                at(
                    f"{place}.resourceClaims",
                    [{"name": "nic"}],
                    [{"name": "nic", "resourceClaimName": "a", "resourceClaimTemplateName": "b"}],
                ),
            ),
            Rule(
                "annotations under millpond.dev/",
                base,
                at(f"{place}.metadata.annotations", {"a/b": "x"}),
                at(f"{place}.metadata.annotations", {"millpond.dev/revision": "x"}),
            ),
            Rule(
                'volume names that start with "millpond-"',
                base,
                at(f"{place}.volumes", [{"name": "extra"}, {"name": "data"}]),
                at(f"{place}.volumes", [{"name": "extra"}, {"name": "millpond-config"}]),
            ),
            Rule(
                "/models, /etc/millpond, /dev/shm and /tmp are mounted",
                base,
                at(f"{place}.volumeMounts", [{"name": "extra", "mountPath": "/models-2"}]),
                [
                    (f"{place}.volumeMounts", [{"name": "extra", "mountPath": path}])
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
