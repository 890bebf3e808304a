"""OP-011: whatever combination of sizes and roles the schema lets through has pods that Kubernetes takes."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
import yaml
from kubernetes.client.exceptions import ApiException
from tests.cluster.crd.conftest import Judge
from tests.fixtures.cluster import Cluster
from tests.support.kube import Kube, Manifest
from tests.support.pools import changed, make_full_pool, make_pool, make_scaled_pool, make_split_pool

from millpond_operator.api import list_roles, parse_pool
from millpond_operator.desired.children import make_children, make_owner
from millpond_operator.desired.settings import BuildSettings
from millpond_operator.desired.workload import make_record, make_record_manifest, make_workload_manifest

pytestmark = pytest.mark.cluster

SETTINGS = BuildSettings(engine_image="engine:1", gateway_image="gateway:1")
SIZES = (1, 2, 4, 8)
LIMITS: dict[str, Manifest] = {
    "cpu": {"limits": {"cpu": "4", "memory": "8Gi"}},
    "1 gpu": {"limits": {"nvidia.com/gpu": 1}},
    "2 gpus": {"limits": {"nvidia.com/gpu": "2"}},
    "8 gpus": {"limits": {"nvidia.com/gpu": 8, "memory": "512Gi"}},
    "2 amd": {"limits": {"amd.com/gpu": 2}},
    "claim": {"limits": {"memory": "64Gi"}, "claims": [{"name": "gpus"}]},
}
SHAPES: dict[str, Manifest] = {
    "fixed": {"replicas": 2},
    "neither": {},
    "scaled": {"scaling": {"minReplicas": 0, "maxReplicas": 3, "coldStartHoldSeconds": 10}},
    "split": {"disaggregation": {"prefill": {"replicas": 1}, "decode": {"scaling": {"maxReplicas": 2}}}},
    "split with own": {
        "disaggregation": {
            "prefill": {"resources": {"limits": {"nvidia.com/gpu": 2}}},
            "decode": {"replicas": 3},
        }
    },
}
CASES = list(itertools.product(SIZES, LIMITS, SHAPES))
CLAIMS = {"resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "gpus"}]}


def make_case(size: int, limits: str, shape: str) -> Manifest:
    template = CLAIMS if limits == "claim" else {}
    return make_pool(
        engine={"tensorParallelSize": size}, resources=LIMITS[limits], template=template, **SHAPES[shape]
    )


def render(stored: Manifest) -> list[Manifest]:
    """Everything the operator would make for the stored pool."""
    stored["metadata"] |= {"uid": "9d7a4c1e-5b1c-4d58-9a4b-6e6f2f2a7c10", "generation": 1}
    pool = parse_pool(stored)
    records = [(make_record(pool, role, SETTINGS), role) for role in list_roles(pool)]
    made = [make_record_manifest(make_owner(pool), record) for record, _ in records]
    made += [make_workload_manifest(make_owner(pool), record, replicas=1) for record, _ in records]
    return [dict(manifest.body) for manifest in [*made, *make_children(pool, SETTINGS)]]


def check(kube: Kube, manifest: Manifest) -> None:
    """Apply in a dry run with strict field validation."""
    metadata = {k: v for k, v in manifest["metadata"].items() if k != "namespace"}
    try:
        kube.create({**manifest, "metadata": metadata}, dry_run=True)
    except ApiException as error:
        pytest.fail(f"{manifest['kind']} {metadata['name']}: {json.loads(error.body)['message']}")


def test_op_011_each_accepted_combination_has_a_template_and_the_rest_says_why(
    judge: Judge, crds: Cluster
) -> None:
    kube = Kube(crds.kubeconfig)
    accepted = 0
    for size, limits, shape in CASES:
        answer = judge.create(make_case(size, limits, shape))
        if answer.stored is None:
            words = ("tensorParallelSize", "go to zero and wake together")
            assert all(any(word in cause.message for word in words) for cause in answer.causes), answer.causes
            continue
        accepted += 1
        rendered = render(answer.stored)
        workloads = [found for found in rendered if found["kind"] == "Deployment"]
        assert len(workloads) == (2 if "disaggregation" in answer.stored["spec"] else 1)
        for manifest in workloads:
            check(kube, manifest)
        configs = [yaml.safe_load(f["data"]["engine.yaml"]) for f in rendered if f["kind"] == "ConfigMap"]
        assert {config["tensorParallelSize"] for config in configs} == {size}
    assert len(SHAPES) * len(SIZES) < accepted < len(CASES)


@pytest.mark.parametrize("make", [make_pool, make_full_pool, make_scaled_pool, make_split_pool])
def test_what_a_full_pool_asks_for_is_taken_by_kubernetes(judge: Judge, crds: Cluster, make: Any) -> None:
    """Every field of the template ends in an object that the API server accepts, none of its fields unknown."""
    stored = judge.create(make()).stored
    assert stored is not None
    for manifest in render(stored):
        check(Kube(crds.kubeconfig), manifest)


# Values that Kubernetes refuses in a pod, for fields that end in one.
ODD: list[tuple[str, list[Any]]] = [
    ("spec.engine.image", [" x", "x y"]),
    (
        "spec.engine.env",
        [[{"name": "A=B"}], [{"name": "1A"}], [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]],
    ),
    ("spec.engine.env.1.valueFrom.secretKeyRef.key", ["a b", "a/b", ".."]),
    ("spec.engine.env.2.valueFrom.configMapKeyRef.name", ["A", "a_b"]),
    ("spec.model.secretRef.name", ["A", "a_b", "-a"]),
    ("spec.engine.imagePullSecrets.0.name", ["A"]),
    (
        "spec.resources.limits",
        [{"gpu": 1}, {"cpu": "-1"}, {"nvidia.com/gpu": "2", "a b": 1}, {"nvidia.com/gpu": "2.5"}],
    ),
    ("spec.resources.requests", [{"cpu": "9"}, {"nvidia.com/gpu": 1}, {"example.com/x": 1}]),
    ("spec.resources.claims", [[{"name": "gone"}], [{"name": "nic", "request": "A B"}]]),
    (
        "spec.template.metadata.labels",
        [{"a b": "x"}, {"a": "x y"}, {"a": "-"}, {"a/b/c": "x"}, {"x" * 64: "x"}],
    ),
    ("spec.template.metadata.annotations", [{"a b": "x"}, {"/a": "x"}]),
    ("spec.template.nodeSelector", [{"a b": "x"}, {"a": "x y"}]),
    ("spec.template.priorityClassName", ["A", "a b"]),
    ("spec.template.runtimeClassName", ["A", "a b"]),
    ("spec.template.serviceAccountName", ["A", "a b"]),
    (
        "spec.template.resourceClaims",
        [
            [{"name": "nic"}],
            [{"name": "A", "resourceClaimName": "x"}],
            [{"name": "nic", "resourceClaimName": "X"}],
        ],
    ),
    ("spec.template.volumes.0.name", ["A", "a.b", "millpond-tmp"]),
    ("spec.template.volumeMounts.0.mountPath", ["relative", "/a:b", "/models", "/tmp"]),
    ("spec.template.volumeMounts.0.name", ["missing"]),
]
ODD_CASES = [(path, value) for path, values in ODD for value in values]


@pytest.mark.parametrize(
    ("path", "value"), ODD_CASES, ids=[f"{path}-{value}"[:60] for path, value in ODD_CASES]
)
def test_what_a_pod_may_not_have_is_refused_in_the_pool(judge: Judge, path: str, value: Any) -> None:
    """At apply and at its field, not later as a Deployment that cannot be made."""
    answer = judge.create(changed(make_full_pool(), path, value))
    assert answer.stored is None
    fields = [re.sub(r"\[(\d+)\]", r".\1", cause.field) for cause in answer.causes]
    assert [field for field in fields if field.startswith(path) or path.startswith(field)], answer.causes
