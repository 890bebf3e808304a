"""Rules of model, engine and the forms of names, sources and sizes."""

from __future__ import annotations

from tests.cluster.crd.rules_base import (
    ADAPTER,
    BAD_NAMES,
    BAD_SIZES,
    BAD_SOURCES,
    CLAIM,
    CLIMBING_SOURCES,
    FULL,
    GOOD_NAMES,
    GOOD_SIZES,
    GOOD_SOURCES,
    HUB,
    POOL,
    TELLING_SOURCES,
    Rule,
    at,
)
from tests.support.pools import REMOVE, changed

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
            *({"source": s, "sha256": "0" * 64} for s in GOOD_SOURCES if s.startswith(("http", "s3"))),
        ),
        at(
            "spec.model",
            *(
                {"source": s, "sha256": "0" * 64}
                for s in ("hf://o/r", "oci://r.io/i:1", "file:///m.gguf", "pvc://c/m")
            ),
        ),
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
    *(
        Rule(message, base, at(path, *GOOD_SOURCES), at(path, *refused))
        for base, path in ((POOL, "spec.model.source"), (ADAPTER, "spec.model.adapters.0.source"))
        for message, refused in (
            ("write hf://OWNER/REPO", BAD_SOURCES),
            ("whoever sees the pool reads its sources", TELLING_SOURCES),
            ("write the path of a source without", CLIMBING_SOURCES),
        )
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
            "write metadata.name, .namespace",
            FULL,
            at(
                f"{path}.3.valueFrom.fieldRef.fieldPath",
                "metadata.uid",
                "metadata.labels['a.b/c-d']",
                "status.podIPs",
            ),
            at(
                f"{path}.3.valueFrom.fieldRef.fieldPath",
                "spec.containers",
                "metadata.labels[a]",
                "metadata.labels['']",
            ),
        )
        for path in ("spec.model.env", "spec.engine.env")
    ),
    *(
        Rule(
            "write value or valueFrom",
            FULL,
            at(f"{path}.0.value", "", REMOVE),
            at(f"{path}.0.valueFrom", {"fieldRef": {"fieldPath": "metadata.name"}}),
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
