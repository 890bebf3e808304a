"""Valid objects that the cases of the rules start from, and values that several cases share."""

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
    """The beginning of a rule's message, which tells rules apart, a valid object, and changes of one field."""

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
CLAIMING = make_pool(
    resources={"limits": {"memory": "1Gi"}, "claims": [{"name": "nic"}]},
    template={"resourceClaims": [{"name": "nic", "resourceClaimTemplateName": "nics"}]},
)
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
    "https://h/a@b/f", "https://h/f?by=a@b", "hf://o/..r/a..b/f...gguf",
]  # fmt: skip
BAD_SOURCES = [
    "ftp://h/f", "owner/repo", "hf://owner", "hf://a/b/", "pvc://Claim", "s3://bucket", "s3://bucket/", "oci://",
    "http://h", "https:///f", "file://m", "hf://o/r x", "xhf://o/r", "hf:/o/r/x",
]  # fmt: skip
TELLING_SOURCES = ["https://user:word@h/f", "http://token@h:8443/f"]
CLIMBING_SOURCES = ["pvc://claim/../../etc", "hf://../x", "hf://o/r/./f", "s3://bucket/a/..", "http://h/../f"]
GOOD_NAMES = ["a", "Qwen/Qwen3-8B", "llama-3.1:8b_q4"]
BAD_NAMES = ["-a", "a/", "two words", "naïve"]
GOOD_SIZES = ["1Mi", "1.5Gi", "10G", "1e9"]
BAD_SIZES = ["0", "-1Gi", "10GB", "much", "1m", "1", "1.5", "1Ki"]
GOOD_MEMORY = ["1Mi", "1.5Gi", "4G", "1e9", 4294967296]
BAD_MEMORY = ["400m", 4, "4", "1.5", 0]
"""Of memory limits: what is left of a size whose unit was forgotten or is the one for cores."""
BAD_AMOUNTS = ["4GB", "4gb", "4 Gi", "two", "-4Gi", -1, ""]
GOOD_PRICES = ["0", "0.20", "123456789.12345678"]
BAD_PRICES = ["-1", "1,5", ".5", "1.", "1e3", "free"]
