"""Rules of names: of objects, tenants, variables, keys, images, currencies, labels and mounts."""

from __future__ import annotations

from tests.cluster.crd.rules_base import CLASSES, FULL, Rule, at
from tests.support.pools import changed

TENANTS = "spec.scheduling.tenants"
TEMPLATE = "spec.template"
OBJECT_NAMES = (
    "spec.model.secretRef.name",
    "spec.model.env.1.valueFrom.secretKeyRef.name",
    "spec.engine.env.2.valueFrom.configMapKeyRef.name",
    "spec.model.cache.storageClassName",
    "spec.engine.imagePullSecrets.0.name",
    f"{TENANTS}.0.apiKeySecretRef.name",
    f"{TEMPLATE}.priorityClassName",
    f"{TEMPLATE}.runtimeClassName",
    f"{TEMPLATE}.serviceAccountName",
    f"{TEMPLATE}.resourceClaims.0.resourceClaimTemplateName",
    f"{TEMPLATE}.resourceClaims.1.resourceClaimName",
)
KEPT = changed(FULL, "spec.model.cache", {"type": "Claim", "claimName": "weights"})
SPARE_CLASS = changed(FULL, CLASSES, [*FULL["spec"]["scheduling"]["classes"], {"name": "spare"}])
SPARE_VOLUME = changed(FULL, f"{TEMPLATE}.volumes", [{"name": "extra"}, {"name": "spare"}])
GOOD_LABELS = ({"a": ""}, {"a": "B_c.d-9"}, {"a": "x" * 63})
BAD_LABELS = ({"a": "b c"}, {"a": "-b"}, {"a": "b/c"})

NAMES = [
    *(
        Rule(
            "write a-z, 0-9 and - . only",
            base,
            at(path, "a", "acme-keys.v2", "9"),
            at(path, "Acme", "acme_keys", "-acme", "acme.", "two words"),
        )
        for base, path in ((KEPT, "spec.model.cache.claimName"), *((FULL, path) for path in OBJECT_NAMES))
    ),
    *(
        Rule(
            "write a-z, 0-9 and - only",
            base,
            at(path, "a", "team-7", "7"),
            at(path, "Team", "team_7", "team.7", "-team", "team-"),
        )
        for base, path in (
            (FULL, f"{TENANTS}.0.name"),
            (SPARE_CLASS, f"{CLASSES}.2.name"),
            (FULL, "spec.resources.claims.0.request"),
            (FULL, f"{TEMPLATE}.resourceClaims.1.name"),
            (SPARE_VOLUME, f"{TEMPLATE}.volumes.1.name"),
        )
    ),
    *(
        Rule(
            "write letters, digits, _ . and - only",
            FULL,
            at(f"{path}.0.name", "_a", "HTTPS_PROXY", "a.b-c"),
            at(f"{path}.0.name", "9A", "A B", "A=B", "-A"),
        )
        for path in ("spec.model.env", "spec.engine.env")
    ),
    *(
        Rule(
            "write letters, digits, - _ and . only",
            FULL,
            at(f"{path}.valueFrom.secretKeyRef.key", "a", ".hidden", "tls.key"),
            at(f"{path}.valueFrom.secretKeyRef.key", "..", "a/b", "a b"),
        )
        for path in ("spec.model.env.1", "spec.engine.env.1")
    ),
    Rule(
        "write a branch, tag or commit",
        FULL,
        at("spec.model.revision", "main", "refs/pr/3", "v1.0_b"),
        at("spec.model.revision", "/main", "two words", "a?b"),
    ),
    Rule(
        "write an image reference",
        FULL,
        at("spec.engine.image", "r.io:5000/a/b@sha256:ab"),
        at("spec.engine.image", "a b", "a\tb", " a"),
    ),
    Rule(
        "write the three capital letters",
        FULL,
        at("spec.scheduling.pricing.currency", "USD"),
        at("spec.scheduling.pricing.currency", "usd", "US", "$"),
    ),
    *(
        Rule("write values with letters", FULL, at(path, *GOOD_LABELS), at(path, *BAD_LABELS))
        for path in (f"{TEMPLATE}.metadata.labels", f"{TEMPLATE}.nodeSelector")
    ),
    Rule(
        "write an absolute path without colons",
        FULL,
        at(f"{TEMPLATE}.volumeMounts.0.mountPath", "/a", "/a/b.c"),
        at(f"{TEMPLATE}.volumeMounts.0.mountPath", "a", "/a:b", "/"),
    ),
]
